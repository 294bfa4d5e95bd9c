"""tools/check_structure.py, room_circles.py, check_named_tests.py, check_misuse_rows.py and
count_tests.py on small samples."""

import contextlib
import io
import os
import pathlib
import tempfile
import unittest

import check_misuse_rows
import check_named_tests
import check_structure
import count_tests
import room_circles


def checks_of(source, **implementations):
    """Of a header and of .cc files, by their names."""
    checks = check_structure.Checks()
    check_structure.check_file("engine/sample.h", source.encode(), checks)
    for name, text in implementations.items():
        check_structure.check_file(f"engine/{name}.cc", text.encode(), checks)
    check_structure.check_implementations(checks)
    check_structure.check_locks(checks)
    return checks


def complaints_about(source, **implementations):
    return checks_of(source, **implementations).complaints


def report_on(source):
    return checks_of(source).report


def lines(format_, count):
    return "\n".join(format_.format(i) for i in range(count))


class CheckStructureTest(unittest.TestCase):
    def test_a_file_of_351_lines_is_reported(self):
        self.assertEqual(report_on("int x;\n" * 350), [])
        self.assertEqual(report_on("int x;\n" * 351), ["engine/sample.h: 351 lines"])

    def test_a_class_with_13_private_methods_is_reported(self):
        def sample(methods):
            return f"""namespace pinion {{
class Sample final : public Base {{
 public:
  Sample();
{lines("  void Public{0}();", 20)}

 private:
{lines("  void Private{0}() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);", methods)}
}};
}}
"""

        self.assertEqual(report_on(sample(12)), [])
        self.assertEqual(
            report_on(sample(13)), ["engine/sample.h:2: Sample: 13 private methods"]
        )

    def test_every_shape_of_a_private_method_counts(self):
        source = f"""
class Sample {{
  int FirstOfAll();
 protected:
  void Protected();
 private:
  static Sample* Pointer(int a);
  const std::string& Reference() const override;
  std::vector<int> Defined(int a = 3) const {{ return {{a}}; }}
  template <typename T>
  T Template(T t);
  bool operator()(int a) const;
{lines("  void More{0}();", 7)}
}};
"""
        self.assertEqual(report_on(source), ["engine/sample.h:2: Sample: 13 private methods"])

    def test_what_is_no_private_method_does_not_count(self):
        source = f"""
struct Sample {{
{lines("  void Public{0}();", 13)}
 private:
  explicit Sample(int a);
  ~Sample();
  friend class Other;
  struct Nested {{
{lines("    void Nested{0}();", 13)}
  }};
  std::function<void(int)> callback_;
  void (*function_)(int) = nullptr;
{lines("  void Private{0}();", 12)}
}};
"""
        self.assertEqual(report_on(source), [])

    def test_a_nested_class_counts_by_itself(self):
        source = f"""
class Outer {{
  class Inner {{
{lines("    void Private{0}();", 13)}
  }};
}};
"""
        self.assertEqual(
            report_on(source), ["engine/sample.h:3: Outer::Inner: 13 private methods"]
        )

    def test_a_lock_with_7_fields_is_reported(self):
        def sample(fields):
            return f"""
class Sample {{
  Mutex mu_;
{lines("  int field{0}_ ABSL_GUARDED_BY(mu_) = 0;  // a comment", fields)}
  Mutex other_mu_;
  std::map<int, int> other_ ABSL_GUARDED_BY(other_mu_);
}};
"""

        self.assertEqual(report_on(sample(6)), [])
        self.assertEqual(
            report_on(sample(7)),
            ["engine/sample.h:2: Sample::mu_: 7 fields that it guards"],
        )

    def test_fields_belong_to_the_class_around_them_or_to_the_file(self):
        source = f"""
// Comments may speak of int x ABSL_GUARDED_BY(mu_).
//   int y ABSL_GUARDED_BY(mu_);
{lines("int global{0} ABSL_GUARDED_BY(mu) = 0;", 7)}
class Sample {{
  struct alignas(128) Nested {{
{lines("    int field{0} ABSL_GUARDED_BY(mu_);", 6)}
  }};
{lines("  int field{0}_ ABSL_GUARDED_BY(mu_);", 6)}
}};
"""
        self.assertEqual(report_on(source), ["engine/sample.h: mu: 7 fields that it guards"])

    def test_what_a_pointer_points_to_counts_as_guarded(self):
        source = f"""
struct Sample {{
  Mutex mu;
{lines("  int field{0} ABSL_GUARDED_BY(mu) = 0;", 6)}
  const std::unique_ptr<Schedule> schedule ABSL_PT_GUARDED_BY(mu);
}};
"""
        self.assertEqual(
            report_on(source), ["engine/sample.h:2: Sample::mu: 7 fields that it guards"]
        )

    def test_a_plain_struct_of_the_same_file_counts_by_its_fields(self):
        def sample(struct, field="Books books_ ABSL_GUARDED_BY(mu_)"):
            return f"""
{struct}
class Sample {{
  struct Nested {{}};
  Mutex mu_;
  {field};
  int other_ ABSL_GUARDED_BY(mu_) = 0;
}};
"""

        too_many = "Sample::mu_: 7 fields that it guards"
        fields = lines("  int field{0} = 0;", 6)
        nested = f"struct Page {{\n{lines('  int line{0};', 5)}\n}};\nstruct Books {{\n  Page page;\n  int size;\n}};"
        for struct in (f"struct Books {{\n  // A comment.\n{fields}\n}};", nested):
            found = report_on(sample(struct))
            self.assertEqual([complaint.partition(": ")[2] for complaint in found], [too_many], struct)
        for struct in (
            f"class Books {{\n public:\n{fields}\n}};",
            f"struct Books {{\n  void Method();\n{fields}\n}};",
            f"struct Books {{\n  explicit Books(int x);\n{fields}\n}};",
            f"struct Books {{\n  int Inline() const {{ return 0; }}\n{fields}\n}};",
            f"struct Books {{\n private:\n{fields}\n}};",
            f"struct Books {{\n  static constexpr int kMost = 1;\n{lines('  int field{0};', 5)}\n}};",
            "struct Books;",
        ):
            self.assertEqual(report_on(sample(struct)), [], struct)
        plain = f"struct Books {{\n{fields}\n  Books* next;\n}};"
        for field in ("Books* books_ ABSL_GUARDED_BY(mu_)", "std::vector<Books> books_ ABSL_GUARDED_BY(mu_)"):
            self.assertEqual(report_on(sample(plain, field)), [], field)

    def test_a_lock_that_no_class_has_counts_class_by_class(self):
        source = f"""
class First {{
{lines("  int field{0}_ ABSL_GUARDED_BY(kLock) = 0;", 6)}
}};
class Second {{
{lines("  int field{0}_ ABSL_GUARDED_BY(kLock) = 0;", 7)}
}};
"""
        self.assertEqual(
            report_on(source), ["engine/sample.h:10: Second::kLock: 7 fields that it guards"]
        )

    def test_fields_of_others_count_for_the_lock_that_guards_them(self):
        source = f"""
class User {{
  State& state_;
  int mine_ ABSL_GUARDED_BY(state_.mu);
  Unknown unknown_;
{lines("  int other{0}_ ABSL_GUARDED_BY(unknown_.mu);", 6)}
}};
struct State {{
  Mutex mu;
{lines("  int field{0} ABSL_GUARDED_BY(mu) = 0;", 6)}
}};
"""
        self.assertEqual(
            report_on(source), ["engine/sample.h:13: State::mu: 7 fields that it guards"]
        )

    def test_a_class_in_two_files_is_too_much(self):
        header = "namespace pinion {\nclass Sample {\n  struct Nested;\n};\n}\n"
        two = ["engine/sample.h:2: Sample: 2 files that implement it (engine/a.cc, engine/b.cc), 1 at most"]
        for member in (
            "void Sample::Method() {}",
            "Sample::Sample() : x_(1) {}",
            "Sample::~Sample() = default;",
            "const Other& Sample::Reference() const { return x_; }",
            "Other* Sample::Pointer() { return x_; }",
            "Sample::Nested* Sample::OfNested() { return x_; }",
            "bool Sample::operator==(const Sample& other) const { return true; }",
            "Sample::operator bool() const { return true; }",
            "int Sample::static_ = 0;",
            "std::atomic<int> Sample::static_{0};",
            "namespace { int F() { return 0; } }\nint Sample::Method() const { return F(); }",
            "void pinion::Sample::Method() {}",
        ):
            inside = f"namespace pinion {{\n{member}\n}}\n"
            self.assertEqual(complaints_about(header, a=inside), [], member)
            self.assertEqual(complaints_about(header, a=inside, b="void Sample::Other() {}"), two, member)

    def test_what_is_no_member_of_the_class_may_be_anywhere(self):
        header = "class Sample {\n  struct Nested {};\n};\n"
        for other in (
            "int Sample::*CounterOf(int x) { return &Sample::x; }",
            "int Sample::** TableOf(int x) { return &table; }",
            "Sample::Nested Function(const Sample::Nested& x) { return x; }",
            "Sample::Nested global = {};",
            "void Sample::Nested::Method() {}",
            "void other_namespace::Function() {}",
            "int Function() { return Sample::Static(); }",
            "namespace { class Sample {\n  void Method();\n};\nvoid Sample::Method() {} }",
        ):
            self.assertEqual(complaints_about(header, a="void Sample::Method() {}", b=other), [], other)

    def test_a_scope_is_nodiscard_for_clang_and_for_gcc(self):
        whole, part = "a scope that is not [[nodiscard]]", "a scope's constructor that is not [[nodiscard]]"
        for name in ("Scope", "SampleScope", "SampleRegion", "SampleGuard"):
            for class_says, constructor_says in ((1, 1), (0, 1), (1, 0), (0, 0)):
                source = f"""
class {"[[nodiscard]] " * class_says}{name} final : public Base {{
 public:
  {"[[nodiscard]] " * constructor_says}explicit {name}(int x) : x_(x) {{}}
  ~{name}();
  {name}(const {name}&) = delete;
}};
"""
                expected = [] if class_says else [f"engine/sample.h:2: {name}: {whole}"]
                expected += [] if constructor_says else [f"engine/sample.h:4: {name}: {part}"]
                self.assertEqual(complaints_about(source), expected, source)

    def test_what_only_has_the_name_of_a_scope_may_be_discarded(self):
        for source in (
            "class EmuGuard final : public c10::impl::DeviceGuardImplInterface {\n  EmuGuard();\n};",
            "struct PackScope {\n  PackScope();\n};",
            "class Scopes {\n  Scopes();\n};",
            "class SampleScope;",
        ):
            self.assertEqual(complaints_about(source), [], source)

    def test_scopes_of_tests_and_benchmarks_are_checked_too(self):
        with tempfile.TemporaryDirectory() as directory:
            for name in ("hooks/a.h", "bench/peers/b.h", "tests/c.cc"):
                path = pathlib.Path(directory) / name
                path.parent.mkdir(parents=True)
                path.write_text("class SampleScope {};\n")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                self.assertEqual(check_structure.main([directory]), 1)
        found = [line.partition(": ")[0] for line in output.getvalue().splitlines()]
        self.assertEqual(found, ["hooks/a.h:1", "bench/peers/b.h:1", "tests/c.cc:1", "1 passed, 3 failed"])

    def test_a_test_that_a_busy_machine_breaks_is_named(self):
        for line in (
            "alarm(10);",
            "EXPECT_LT(absl::Now() - start, absl::Seconds(9));",
            "const auto start = std::chrono::steady_clock::now();",
            "EXPECT_EQ(std::system(command.c_str()), 0);",
            "TEST(SampleModel, IsTheBest) {",
            "TEST_F(SampleModel, IsTheBest) {",
        ):
            checks = check_structure.Checks()
            check_structure._check_test("tests/a_test.cc", f"int x;\n{line}\n".encode(), checks)
            self.assertEqual([text.partition(": ")[0] for text in checks.complaints], ["tests/a_test.cc:2"], line)
        checks = check_structure.Checks()
        source = b"TEST(SampleModel, A) {\n  absl::SleepFor(absl::Milliseconds(1));\n  RunVisibly(alarm);\n}\n"
        check_structure._check_test("tests/a_model_test.cc", source, checks)
        self.assertEqual(checks.complaints, [])

    def test_a_test_without_the_macros_of_pinion_bzl_fails(self):
        with tempfile.TemporaryDirectory() as directory:
            for name, text in {
                "engine/a.h": "",
                "tests/BUILD.bazel": "# cc_test(\npinion_test(\n)\nsuites_test(\n)\n",
                "tests/engine/BUILD.bazel": "[\n    cc_test(\n    )\n]\n",
                "tests/hooks/c.bzl": "native.cc_test(\n)\n",
            }.items():
                path = pathlib.Path(directory) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                self.assertEqual(check_structure.main([directory]), 1)
        found = [line.partition(": ")[0] for line in output.getvalue().splitlines()]
        self.assertEqual(found, ["tests/engine/BUILD.bazel:2", "tests/hooks/c.bzl:1", "1 passed, 2 failed"])

    def test_large_files_of_the_layers_are_reported_and_fail_nothing(self):
        with tempfile.TemporaryDirectory() as directory:
            for name in ("allocator/heap/a.h", "hooks/b.cc", "bench/c.cc", "engine/link/d.txt"):
                path = pathlib.Path(directory) / name
                path.parent.mkdir(parents=True)
                path.write_text("int x;\n" * 351)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                self.assertEqual(check_structure.main([directory]), 0)
        self.assertEqual(
            output.getvalue().splitlines(),
            [
                "report: allocator/heap/a.h: 351 lines",
                "report: hooks/b.cc: 351 lines",
                "2 passed, 0 failed",
            ],
        )

    def test_a_place_without_a_library_fails(self):
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(check_structure.main([directory]), 1)


def graph(*edges):
    nodes = "\n".join(f'  "{edge.split(" -> ")[0]}"' for edge in edges)
    return (
        "digraph mygraph {\n  node [shape=box];\n"
        + nodes
        + "\n"
        + "\n".join('  "{}" -> "{}"'.format(*edge.split(" -> ")) for edge in edges)
        + "\n}\n"
    )


class RoomCirclesTest(unittest.TestCase):
    def complaints(self, *edges):
        return list(room_circles.complaints(graph(*edges)))

    def test_rooms_below_each_other_are_no_circle(self):
        self.assertEqual(
            self.complaints(
                "//hooks/plan:recorder -> //hooks/activations:policy",
                "//hooks/plan:recorder -> //engine/planner:trace",
                "//hooks/activations:session -> //engine/schedule:schedule",
                "//engine/schedule:schedule -> //engine/planner:trace",
            ),
            [],
        )

    def test_two_rooms_that_need_each_other_are_a_circle_though_no_targets_are(self):
        self.assertEqual(
            self.complaints(
                "//hooks/plan:recorder -> //hooks/activations:policy",
                "//hooks/activations:session -> //hooks/plan:schedule",
                "//hooks/activations:session -> //hooks/activations:policy",
                "//hooks/activations:session -> //engine/planner:trace",
            ),
            [
                "a circle of //hooks/activations, //hooks/plan",
                "  //hooks/activations:session -> //hooks/plan:schedule",
                "  //hooks/plan:recorder -> //hooks/activations:policy",
            ],
        )

    def test_a_circle_of_three_rooms_is_found(self):
        found = self.complaints(
            "//engine/a:a1 -> //engine/b:b", "//engine/b:b -> //engine/c:c", "//engine/c:c -> //engine/a:a2"
        )
        self.assertEqual(found[0], "a circle of //engine/a, //engine/b, //engine/c")

    def test_what_a_layer_shows_is_a_room_of_its_own(self):
        self.assertEqual(
            self.complaints(
                "//engine:engine -> //engine/tier:host_tier", "//engine/tier:host_tier -> //engine:host_buffer"
            ),
            [],
        )

    def test_a_folder_as_one_file_and_other_folders_do_not_count(self):
        self.assertEqual(
            self.complaints(
                "//engine:coalesce -> //engine:one_file",
                "//engine:one_file -> //engine:engine_text",
                "//engine:one_file -> //engine/tier:tier_text",
                "//engine/tier:tier -> //engine:coalesce",
                "//bench/a:a -> //bench/b:b",
                "//bench/b:b2 -> //bench/a:a2",
            ),
            [],
        )

    def test_no_dependency_at_all_is_a_failure(self):
        self.assertEqual(self.complaints(), ["bazel named no dependency between two rooms"])


class NamedTestsTest(unittest.TestCase):
    def complaints(self, *rows, page="tests/peers.md"):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            (root / "docs" / "users").mkdir(parents=True)
            (root / "tests").mkdir()
            (root / "tests" / "rules_test.cc").write_text("TEST(Rules, Hold) {}\n")
            (root / "tests" / "more").mkdir()
            (root / "tests" / "more" / "rules_test.cc").write_text("TEST(Rules, HoldThere) {}\n")
            table = ["| TRL | Pinion | tests |", "|---|---|---|", *rows]
            (root / page).write_text("\n".join(table) + "\n")
            return check_named_tests.complaints_and_count(root)[0]

    def test_a_row_with_a_test_that_is_there_is_fine(self):
        self.assertEqual(self.complaints("| a | b | `rules_test`: `Rules.Hold` |"), [])

    def test_two_files_of_one_name_have_the_tests_of_both(self):
        row = "| a | b | `rules_test`: `Rules.Hold`, `Rules.HoldThere` |"
        self.assertEqual(self.complaints(row), [])

    def test_every_shape_of_a_row_without_a_test_is_found(self):
        for row in ("| a | b | c |", "| TRL does | b | c |", "| a | b | c |  ", "| a | b | c", "|a | b | c|"):
            first = row.split("|")[1].strip()
            self.assertEqual(
                self.complaints(row), [f"tests/peers.md: a row without a test: {first}"], row
            )

    def test_a_test_in_another_cell_is_not_the_rows(self):
        self.assertEqual(
            self.complaints("| a | `Rules.Hold` | c |"), ["tests/peers.md: a row without a test: a"]
        )

    def test_a_test_that_is_not_there_is_named_with_its_line(self):
        self.assertEqual(
            self.complaints("| a | b | `rules_test`: `Rules.Hold`, `Rules.Break` |"),
            ["tests/peers.md:3: `Rules.Break` is no test in rules_test.cc"],
        )

    def test_a_file_without_names_has_to_exist(self):
        self.assertEqual(self.complaints("| `rules_test` | b | `Rules.HoldThere` |"), [])
        self.assertEqual(
            self.complaints("| `test_of_rules_test` | b | `Rules.Hold` |"),
            ["tests/peers.md:3: `test_of_rules_test` is no test"],
        )

    def test_every_page_of_docs_and_tests_is_checked(self):
        for page in ("README.md", "docs/users/limits.md", "tests/more/notes.md"):
            self.assertEqual(self.complaints("| a | b | c |", page=page), [f"{page}: a row without a test: a"])

    def test_heads_are_no_rows(self):
        self.assertEqual(self.complaints("", "| TRL | Pinion | tests |", "|:---|---|---:|", "| a | b | `Rules.Hold` |"), [])


class MisuseRowsTest(unittest.TestCase):
    HEADER = """#include "pinion/engine/inner.h"
        namespace pinion {
        // Comment(int here);
        class [[nodiscard]] Pool : public Base<int> {
         public:
          explicit Pool(int size) : size_(size), other_{1} { Use(size); }
          Pool(const Pool&) = delete;
          ~Pool();
          void Add(std::function<int(int)> work = Nothing()) const { if (work) work(1); }
          int size() const { return size_; }
          bool operator==(const Pool& other) const = default;
          void Show(int) override;
         private:
          void Hide(int value);
          std::function<void(int)> call_{[](int) {}};
        };
        namespace internal { void Own(int value); }
        template <typename T = int>
        auto Make(T&& value) -> std::vector<T> { return {value}; }
        TORCH_MODULE(Net);
        }
        """

    def complaints(self, *rows, header=HEADER, inner=""):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            for folder in (*check_misuse_rows._FOLDERS, "docs/users", "tests"):
                (root / folder).mkdir(parents=True)
            (root / "README.md").write_text("Include `pinion/engine/pool.h`.\n")
            (root / "engine" / "pool.h").write_text(header)
            (root / "engine" / "inner.h").write_text(inner)
            (root / "engine" / "unnamed.h").write_text("void Unnamed(int);\n")
            (root / "tests" / "misuse.md").write_text("\n".join(rows) + "\n")
            return check_misuse_rows.complaints_and_count(root)[0]

    def test_each_public_function_with_an_argument_needs_a_row(self):
        self.assertEqual(
            self.complaints(),
            [f"engine/pool.h: {name} has no row in tests/misuse.md" for name in ("Pool", "Pool::Add", "Make")],
        )

    def test_rows_name_functions_by_class_or_after_one_of_their_class(self):
        self.assertEqual(self.complaints("| function | tests |", "|---|---|", "| `Pool`, `Pool::Add` |", "| `Make` |"), [])
        self.assertEqual(self.complaints("| function |", "| `Pool::Pool`, `Add`, `Make` | `Pool` |")[:1],
                         ["tests/misuse.md:2: no header has `Pool::Pool`"])
        self.assertEqual(len(self.complaints("| argument |", "| `Pool`, `Pool::Add`, `Make` |")), 3)

    def test_a_row_of_a_function_that_is_gone_is_named(self):
        rows = ("| function |", "| `Pool`, `Pool::Add`, `Take`, `Make` |")
        self.assertEqual(self.complaints(*rows), ["tests/misuse.md:2: no header has `Take`"])

    def test_headers_that_public_ones_include_are_public_unless_the_page_says_why_not(self):
        rows = ("| function |", "| `Pool`, `Pool::Add`, `Make` |", "", "| internal header | why |")
        self.assertEqual(self.complaints(*rows, inner="void In(int);"),
                         ["engine/inner.h: In has no row in tests/misuse.md"])
        self.assertEqual(self.complaints(*rows, "| `engine/inner.h` | a member |", inner="void In(int);"), [])
        self.assertEqual(self.complaints(*rows, "| `engine/other.h` | gone |"),
                         ["tests/misuse.md:5: no guide's header includes engine/other.h"])

    def test_modules_have_the_names_of_their_holders(self):
        header = "class NetImpl { public: NetImpl(int a); void Run(int); };"
        self.assertEqual(self.complaints("| function |", "| `nn::Net`, `nn::Net::Run` |", header=header), [])


class CountTestsTest(unittest.TestCase):
    def counted(self, reports, *newer_than):
        """What is printed about {folder: XML of its test cases}."""
        with tempfile.TemporaryDirectory() as directory:
            for folder, cases in reports.items():
                path = pathlib.Path(directory) / folder / "test.xml"
                path.parent.mkdir(parents=True)
                path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                count_tests.main([directory, *newer_than])
        return output.getvalue().splitlines()

    def test_cases_of_all_folders_count_but_for_those_not_run(self):
        self.assertEqual(
            self.counted(
                {
                    "tests/a_test": '<testcase status="run" name="Passes"/>'
                    '<testcase status="run" result="skipped" name="Skips"/>'
                    '<testcase status="notrun" name="IsFilteredOut"/>',
                    "tests/b_test/shard_1_of_2": '<testcase status="run" name="Passes"/>',
                }
            )[0],
            "2 0 1",
        )

    def test_of_one_case_in_two_environments_the_one_that_failed_is_named(self):
        failing = '<testcase classname="Bits" name="AreTheSame"><failure message="1 != 2"/></testcase>'
        passing = '<testcase classname="Bits" name="AreTheSame"/>'
        self.assertEqual(
            self.counted({"tests/bits_avx2_test": failing, "tests/bits_default_test": passing}),
            ["1 1 0", "FAILED: tests/bits_avx2_test: Bits.AreTheSame", "  1 != 2"],
        )

    def test_what_is_older_than_the_file_does_not_count(self):
        with tempfile.NamedTemporaryFile() as later:
            os.utime(later.name, (2**32, 2**32))
            self.assertEqual(self.counted({"tests/a_test": '<testcase name="Passes"/>'}, later.name)[0], "0 0 0")


if __name__ == "__main__":
    unittest.main()
