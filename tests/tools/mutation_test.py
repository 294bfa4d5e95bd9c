"""tools/mutate on a small C++ program of its own."""

import contextlib
import io
import os
import pathlib
import subprocess
import tempfile
import types
import unittest
import unittest.mock

import build
import cpp_source
import main
import mutants
import report
import runs
import schemata

_SAMPLE = b"""#include <algorithm>
#include <vector>

#include "absl/status/status.h"

constexpr int kMost = 3;

enum class Side { kLeft, kRight };

// The larger of two: which one is returned when they are equal makes no difference.
int Larger(int a, int b) {
  return a > b ? a : b;
}

int CountTo(int end) {
  int i = 0;
  while (i < end) {
    ++i;
  }
  return i;
}

int Minus(int a, int b) { return a - b; }

int Tested(int a, int b) {
  if (a == kMost) return b;
  return Minus(a, b);
}

int NotCalled(int a) { return a + 1; }
"""

_PROGRAM = """
#include "sample.inc"
int main() {
  bool good = Larger(1, 2) == 2 && Larger(5, 3) == 5 && Larger(4, 4) == 4 && CountTo(3) == 3 && CountTo(0) == 0;
  good = good && Tested(3, 8) == 8 && Tested(9, 4) == 5;
  return good ? 0 : 1;
}
"""


def named(found, change):
    chosen = [mutant for mutant in found if mutant.change == change]
    assert len(chosen) == 1, (change, [mutant.name for mutant in found])
    return chosen[0]


def changes(text):
    source = text.encode()
    return [mutant.change for mutant in mutants.find("x.cc", source, cpp_source.enumerators([source]))]


class FindTest(unittest.TestCase):
    def test_a_comparison_is_moved_and_turned(self):
        found = changes("bool F(int a) { return G(a < 2); }")
        self.assertIn("a < 2 -> a <= 2", found)
        self.assertIn("a < 2 -> a >= 2", found)
        self.assertIn("2 -> 3", found)

    def test_each_operand_of_a_boolean_operator_can_go(self):
        found = changes("void F(bool a, bool b) { if (a && b) G(); }")
        self.assertIn("a && b -> a || b", found)
        self.assertIn("a, operand of && -> (nothing)", found)
        self.assertIn("b, operand of && -> (nothing)", found)
        self.assertIn("a && b -> false", found)
        self.assertIn("G(); -> (nothing)", found)

    def test_arguments_of_one_type_are_swapped_and_others_are_not(self):
        self.assertIn("G(a, b) -> G(b, a)", changes("void F(int a, int b) { G(a, b); }"))
        self.assertNotIn("G(a, b) -> G(b, a)", changes("void F(int a, long b) { G(a, b); }"))

    def test_checks_and_waits_are_removed_and_named_so(self):
        source = b"void F(int a) { PINION_CHECK(a > 0) << a + 1; }\nabsl::Status G() { PINION_RETURN_IF_ERROR(x.Wait(1)); return H(); }"
        found = mutants.find("x.cc", source, {})
        self.assertEqual([m.change for m in found if m.line == 1], ["PINION_CHECK(a > 0) << a + 1; -> (nothing)"])
        self.assertIn("removed wait", [m.kind for m in found if m.replacement == ""])
        self.assertIn("(void)(x.Wait(1));", [m.replacement for m in found if m.kind == "removed check"])

    def test_an_enumerator_becomes_its_neighbour(self):
        self.assertIn("E::kA -> E::kB", changes("enum class E { kA, kB };\nvoid F() { G(E::kA); }"))

    def test_functions_return_early(self):
        self.assertIn("at the start -> return;", changes("void F() { G(); H(); }"))
        self.assertIn("return G(); -> return absl::OkStatus();", changes("absl::Status F() { return G(); }"))

    def test_what_the_compiler_computes_and_what_only_people_read_is_left_alone(self):
        for text in (
            "constexpr int kA = 3;",
            "static_assert(1 < 2);",
            "enum E { kA = 1 };",
            "int array[4];",
            "void F() { constexpr int a = 1 + 2; }",
            "void F() { PINION_LOG(kError) << 1 + 2; }",
            "void F() { a.reserve(1 + 2); }",
            "void F() { int array[4]; }",
            "void F() { while (true) continue_here; }",
            "template <int n = 3> class C;",
        ):
            self.assertEqual(changes(text), [], text)
        self.assertEqual(changes("void F(int a) { switch (a) { case 3: return; } }"), ["return; -> (nothing)"])

    def test_what_only_hardened_builds_do_is_marked(self):
        found = mutants.find("x.cc", b"void F() { if (kHardened) G(); H(); }", {})
        self.assertEqual([m.change for m in found if m.only_hardened], ["G(); -> (nothing)"])

    def test_annotations_and_assign_or_return_do_not_hide_code(self):
        found = changes("absl::Status F() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { PINION_ASSIGN_OR_RETURN(const int a, G(1 + x)); return H(a); }")
        self.assertIn("1 + x -> 1 - x", found)

    def test_the_same_file_and_seed_give_the_same_mutants(self):
        found = mutants.find("sample.inc", _SAMPLE, {})
        again = mutants.find("sample.inc", _SAMPLE, {})
        self.assertEqual(main.choose(found, 7, 9), main.choose(again, 7, 9))
        self.assertNotEqual([m.name for m in main.choose(found, 7, 9)], [m.name for m in main.choose(found, 8, 9)])


class RunTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.source = _SAMPLE.replace(b'#include "absl/status/status.h"\n', b"")
        cls.found = mutants.find("sample.inc", cls.source, cpp_source.enumerators([cls.source]))
        for number, mutant in enumerate(cls.found):
            mutant.number = number
        cls.temporary = tempfile.TemporaryDirectory()
        folder = pathlib.Path(cls.temporary.name)
        text, cls.regions = schemata.instrument(cls.source, cls.found)
        (folder / "sample.inc").write_bytes(text)
        (folder / "program.cc").write_text(_PROGRAM)
        subprocess.run(["g++", "-std=c++20", "-O1", "-w", "program.cc", "-o", "program"], cwd=folder, check=True)
        runner = runs.Runner({"program": (str(folder / "program"), str(folder), {})}, folder / "runs")
        cls.groups, cls.failing = runner.measure("program", "1")
        results = main.try_all(runner, cls.found, lambda mutant: cls.groups, 2, lambda text: None)
        cls.results = {mutant.name: result for mutant, result in zip(cls.found, results)}

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def result(self, line_part, change):
        chosen = [m for m in self.found if m.change == change and line_part in m.source_line]
        self.assertEqual(len(chosen), 1, [m.name for m in self.found])
        return self.results[chosen[0].name]

    def test_the_program_passes_while_all_mutants_sleep(self):
        self.assertEqual(self.failing, [])
        self.assertEqual(len(self.groups), 1)

    def test_a_bug_is_killed(self):
        self.assertEqual(self.result("a - b", "a - b -> a + b")["state"], "killed")
        self.assertEqual(self.result("Minus(a, b);", "Minus(a, b) -> Minus(b, a)")["state"], "killed")
        self.assertEqual(self.result("a == kMost", "a == kMost -> false")["state"], "killed")
        self.assertEqual(self.result("a > b", "a > b -> a <= b")["state"], "killed")

    def test_what_makes_no_difference_survives_with_its_diff(self):
        survivors = [r for r in self.results.values() if r["state"] == "survived"]
        self.assertEqual([r["name"] for r in survivors], ["sample.inc:11: comparison: a > b -> a >= b"])
        mutant = named(self.found, "a > b -> a >= b")
        text = report.diff(self.source, mutant)
        self.assertIn("-  return a > b ? a : b;", text)
        self.assertIn("+  return a >= b ? a : b;", text)

    def test_an_endless_loop_is_killed_and_listed_as_a_timeout(self):
        result = self.result("++i;", "++i; -> (nothing)")
        self.assertEqual(result["state"], "killed")
        self.assertTrue(result["timed_out"])

    def test_what_no_test_reaches_is_said_to_be_so(self):
        self.assertEqual(self.result("NotCalled", "a + 1 -> a - 1")["state"], "not reached")

    def test_the_report_counts_and_shows_them(self):
        sources = types.SimpleNamespace(text={"sample.inc": self.source})
        text = report.markdown("command", list(self.results.values()), sources, self.found, [runs.Group("//a:test", ["Suite.Case"])])
        self.assertIn("## Survivors", text)
        self.assertIn("+  return a >= b ? a : b;", text)
        self.assertIn("## Killed by a timeout", text)
        self.assertIn("## Left out: fail without any mutant\n\n* `//a:test Suite.Case`\n", text)
        name, killed, _, survived, unreached = report.summary(list(self.results.values()))[-1]
        self.assertEqual((name, killed + survived + unreached), ("all", len(self.found)))

    def test_what_survived_is_found_again_in_the_file_of_an_earlier_run(self):
        file = pathlib.Path(self.temporary.name) / "results.json"
        report.write_json(file, "command", list(self.results.values()), [])
        alive = report.read_alive(file)
        killed = {result["state"] == "killed" for name, result in self.results.items() if self.key_of(name) in alive}
        self.assertEqual(killed, {False})
        self.assertEqual(len(alive), sum(r["state"] != "killed" for r in self.results.values()))

    def key_of(self, name):
        return next(mutant.key for mutant in self.found if mutant.name == name)

    def test_a_mutant_that_does_not_compile_is_found_by_the_error(self):
        folder = pathlib.Path(self.temporary.name) / "broken"
        folder.mkdir()
        source = b"struct S {};\nS operator+(S, S);\nint F(int a) {\n  S s, t;\n  s + t; return a + 1;\n}\n"
        found = mutants.find("broken.cc", source, {})
        text, regions = schemata.instrument(source, found)
        (folder / "broken.cc").write_bytes(text)
        (folder / "one_file.cc").write_text('#include "./broken.cc"\n')
        for compiled in ["broken.cc", "one_file.cc"]:
            done = subprocess.run(["g++", "-std=c++20", "-w", "-c", compiled], cwd=folder, capture_output=True, text=True)
            self.assertNotEqual(done.returncode, 0)
            tree = build.Tree(folder, folder / "scratch", lambda text: None)
            bad = tree._culprits(done.stderr, {"broken.cc": text}, {"broken.cc": regions})
            self.assertEqual([mutant.change for mutant in bad], ["s + t -> s - t"], compiled)

    def test_a_program_that_fails_without_a_mutant_is_left_out_and_named(self):
        folder = pathlib.Path(self.temporary.name)
        runner = runs.Runner({"//a:bad": ("/bin/false", str(folder), {})}, folder / "bad")
        groups, left_out = main.measure(runner, {"//a:bad": ("/bin/false", str(folder))}, 1, lambda text: None)
        self.assertEqual(groups, {"//a:bad": []})
        self.assertEqual([group.label for group in left_out], ["//a:bad"])

    def test_programs_are_told_which_python_the_tests_use(self):
        folder = pathlib.Path(self.temporary.name)
        runner = runs.Runner({"env": ("/usr/bin/env", str(folder), {})}, folder / "env")
        with unittest.mock.patch.dict(os.environ, {"PINION_TEST_PYTHON": "/a/python"}):
            self.assertIn("PINION_TEST_PYTHON=/a/python", runner.run("env")[1].splitlines())


class BuildTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def tree_and_mutants(self, text):
        (self.folder / "x.cc").write_text(text)
        sources = build.Sources(self.folder, ["x.cc"])
        tree = build.Tree(self.folder, self.folder / "scratch", lambda text: None)
        tree.forget_other_texts(sources)
        return tree, sources.mutants

    def test_of_two_alike_on_one_line_only_the_one_that_does_not_compile_is_left_out(self):
        text = "void F(T a, int b) { G(a + b); H(b + b); G(a + b); }"
        tree, found = self.tree_and_mutants(text)
        alike = [mutant for mutant in found if mutant.change == "a + b -> a - b"]
        self.assertEqual(len(alike), 2)
        tree.reject(alike[:1])
        again, found = self.tree_and_mutants(text)
        self.assertEqual([mutant.start for mutant in found if again.is_rejected(mutant)], [alike[0].start])

    def test_what_did_not_compile_is_tried_again_when_its_file_has_changed(self):
        text = "void F(T a, int b) { G(a + b); }"
        tree, found = self.tree_and_mutants(text)
        tree.reject(found)
        tree, found = self.tree_and_mutants(text + "\n")
        self.assertFalse(any(tree.is_rejected(mutant) for mutant in found))

    def test_the_digest_of_a_test_is_also_that_of_the_libraries_that_it_links(self):
        libraries = self.folder / "runfiles" / "_solib_k8"
        (libraries / "_U@libtorch").mkdir(parents=True)
        binary, own, foreign = self.folder / "test", libraries / "libown.so", libraries / "_U@libtorch" / "libtorch.so"
        for file in (binary, own, foreign):
            file.write_text("1")

        def digest():
            build._digest.cache_clear()
            return build.digest(binary, self.folder / "runfiles")

        digests = [digest()]
        for file in (foreign, own, binary):
            file.write_text("2")
            digests.append(digest())
        self.assertEqual(digests[0], digests[1])
        self.assertEqual(len(set(digests)), 3)


class OptionsTest(unittest.TestCase):
    def test_a_path_that_names_no_file_is_refused(self):
        for path in ("engine/typo.cc", "engin", "tests"):
            with mock_library(["engine/copy_lane.cc"]), contextlib.redirect_stderr(io.StringIO()) as errors:
                with self.assertRaises(SystemExit, msg=path):
                    main.main(["--list", "--paths", "engine", path])
            self.assertIn(f"--paths: {path} is no file or directory", errors.getvalue())

    def test_a_list_fails_where_the_table_names_a_mutant_that_there_is_not(self):
        with mock_library(["engine/copy_lane.cc"]), contextlib.redirect_stderr(io.StringIO()) as errors:
            with contextlib.redirect_stdout(io.StringIO()) as listed:
                self.assertEqual(main.main(["--list", "--paths", "engine"]), 1)
        self.assertIn("engine/copy_lane.cc:1: arithmetic", listed.getvalue())
        self.assertRegex(errors.getvalue(), r"a row that is no mutant's: (allocator|device|engine|hooks)/\S+\.(h|cc)\b")


def mock_library(paths):
    """main finds these files, of one function each, in place of the library."""

    class Sources(build.Sources):
        def __init__(self, root, ignored):
            with tempfile.TemporaryDirectory() as folder:
                for path in paths:
                    (pathlib.Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                    (pathlib.Path(folder) / path).write_text("int F(int a) { return a + 1; }\n")
                super().__init__(folder, paths)

    stack = contextlib.ExitStack()
    stack.enter_context(unittest.mock.patch.object(build, "library_files", lambda root, layers: paths))
    stack.enter_context(unittest.mock.patch.object(build, "Sources", Sources))
    return stack


class TableTest(unittest.TestCase):
    def test_a_row_is_recognised_after_lines_have_moved(self):
        source = b"bool F(bool a, bool b) { return G(a || b); }\n"
        mutant = named(mutants.find("x.cc", source, {}), "a || b -> a && b")
        table = "| file | line | mutant | why |\n|---|---|---|---|\n" + report.table_row(mutant)[:-2] + " proof |\n"
        moved = named(mutants.find("x.cc", b"\n\n// Moved.\n" + source, {}), "a || b -> a && b")
        self.assertEqual(report.read_equivalents(table), {moved.key: "proof"})

    def test_a_row_that_is_no_mutants_is_found(self):
        mutant = named(mutants.find("x.cc", b"bool F(bool a, bool b) { return G(a || b); }\n", {}), "a || b -> a && b")
        other = ("x.cc", "gone", "a -> b")
        self.assertEqual(report.rows_without_mutant({mutant.key: "", other: ""}, [mutant]), [other])

    def test_every_row_of_the_documents_table_has_a_proof(self):
        text = pathlib.Path("tools/mutation/equivalent_mutants.md").read_text()
        known = report.read_equivalents(text)
        self.assertEqual(len(known), sum(row.startswith("| `") for row in text.splitlines()))
        for key, proof in known.items():
            self.assertGreater(len(proof), 20, key)


if __name__ == "__main__":
    unittest.main()
