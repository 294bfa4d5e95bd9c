"""tools/check_prose.py on small samples."""

import contextlib
import io
import os
import pathlib
import subprocess
import tempfile
import unittest

import check_prose

SHORT = "The pool keeps a free block."
LONG = "The pool keeps " + "a free block and " * 7 + "a segment."
HARD = "What is away comes back later."


def sentences(source, path="engine/sample.md"):
    return [(s.line, s.text) for s in check_prose.sentences_of(path, source)]


def complaints(text, path="engine/sample.md"):
    return check_prose.report(list(check_prose.sentences_of(path, text)))[1]


def text_of(short, long=0, hard=0):
    return " ".join([SHORT] * short + [LONG] * long + [HARD] * hard)


class SentencesTest(unittest.TestCase):
    def test_code_heads_and_short_cells_of_a_page_are_no_sentences(self):
        page = f"# A head of four words\n\n```\nNo sentence is in code.\n```\n\n| The cell is short |\n|---|\n| {SHORT} It does. |\n"
        self.assertEqual(sentences(page), [(9, SHORT)])

    def test_an_item_ends_the_paragraph_before_it(self):
        page = f"{SHORT[:-1]}\n* The engine copies\n  a free block.\n"
        self.assertEqual(sentences(page), [(1, SHORT[:-1]), (2, "The engine copies a free block.")])

    def test_links_count_by_their_text_and_code_as_one_word(self):
        found = list(check_prose.sentences_of("a.md", "The [free pool](docs/pool.md) keeps `a b c d`."))
        self.assertEqual([(s.text, s.words) for s in found], [("The free pool keeps X.", 5)])

    def test_comments_of_code_are_read_and_code_is_not(self):
        source = f"// {SHORT[:8]}\n// {SHORT[8:]}\n//\n//   Not the code in it.\nint x;  // Nor beside code, ever.\n"
        self.assertEqual(sentences(source, "engine/sample.h"), [(1, SHORT[:8] + " " + SHORT[8:].strip())])

    def test_a_scripts_comments_begin_with_a_hash(self):
        self.assertEqual(sentences(f"x = 1\n# {SHORT}\n", "tools/sample.py"), [(2, SHORT)])


class LimitsTest(unittest.TestCase):
    def test_a_sentence_of_26_words_is_long(self):
        for words, is_long in ((25, False), (26, True)):
            text = "Pools " + "keep " * (words - 2) + "blocks."
            self.assertEqual(bool(complaints(text)), is_long, words)

    def test_patterns_make_a_sentence_hard_by_their_weights(self):
        (sentence,) = check_prose.sentences_of("a.md", HARD)
        self.assertEqual((sentence.hits, sentence.weight), (["no noun", "away/here"], 5))
        self.assertEqual(complaints("Whoever waits for a block waits for all."), [])

    def test_up_to_six_in_a_hundred_may_be_long(self):
        self.assertEqual(complaints(text_of(short=94, long=6)), [])
        self.assertEqual(complaints(text_of(short=93, long=7)), ["all: 7.0% of the sentences are above 25 words, 6.0% at most"])

    def test_up_to_five_in_a_thousand_may_be_hard_to_parse(self):
        self.assertEqual(complaints(text_of(short=199, hard=1)), [])
        self.assertEqual(complaints(text_of(short=142, hard=1)), ["all: 0.7% of the sentences are hard to parse, 0.5% at most"])

    def test_a_folder_may_have_twice_the_share_and_has_it_by_two_levels(self):
        found = []
        for path, text in (
            ("engine/link/a.md", text_of(short=22, long=3)),
            ("engine/link/b/c.md", text_of(short=22, long=3)),
            ("engine/tier/a.md", text_of(short=88, long=12)),
            ("engine/d.md", text_of(short=500)),
        ):
            found += check_prose.sentences_of(path, text)
        rows, complaints_, passed = check_prose.report(found)
        self.assertEqual([row.split()[0] for row in rows], ["folder", "engine", "engine/link", "engine/tier", "all"])
        self.assertEqual(complaints_, [])
        found += check_prose.sentences_of("engine/link/e.md", LONG)
        self.assertEqual(
            check_prose.report(found)[1:], (["engine/link: 13.7% of the sentences are above 25 words, 12.0% at most"], 7)
        )

    def test_a_folder_of_less_than_20_sentences_counts_in_the_sum_alone(self):
        small = list(check_prose.sentences_of("engine/a.md", text_of(short=16, long=3)))
        large = list(check_prose.sentences_of("device/a.md", text_of(short=100)))
        self.assertEqual(check_prose.report(small + large)[1], [])

    def test_no_sentence_at_all_is_a_failure(self):
        self.assertEqual(complaints("A short cell.\n"), ["no sentence was found"])


class MainTest(unittest.TestCase):
    def run_in_repository(self, text, *arguments):
        before = os.getcwd()
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()) as output:
            subprocess.run(["git", "init", "-q", directory], check=True)
            (pathlib.Path(directory) / "page.md").write_text(text)
            subprocess.run(["git", "-C", directory, "add", "page.md"], check=True)
            os.chdir(directory)
            try:
                status = check_prose.main(list(arguments))
            finally:
                os.chdir(before)
        return status, output.getvalue().splitlines()

    def test_pages_below_the_limits_pass(self):
        status, output = self.run_in_repository(text_of(short=30))
        self.assertEqual((status, output[-1]), (0, "4 passed, 0 failed"))

    def test_a_page_above_a_limit_fails_and_its_worst_sentences_are_listed(self):
        status, output = self.run_in_repository(text_of(short=30, hard=2), "--worst=1")
        self.assertEqual(status, 1)
        self.assertIn("page.md:1  6 words; no noun, away/here", output)
        self.assertEqual(output[-1], "2 passed, 2 failed")
        self.assertEqual(output.count(f"    {HARD}"), 1)


if __name__ == "__main__":
    unittest.main()
