"""Lists the tests that were skipped in every environment that they were in, each with its reason.

    make test test-clients test-examples REPORTS=FOLDER
    python tools/skipped.py FOLDER

Reads the reports that `make` has pytest write (JUnit's XML). The last line counts the tests that passed somewhere and
those that failed somewhere, each once. Exits with 1 if a test failed, or if no environment has the package that a test
needs: each package of a client or an example is to be in one of them.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

NEEDS_PACKAGE = ("could not import", "needs ")


def read(paths: Iterable[Path]) -> dict[str, list[tuple[str, str]]]:
    """Return what became of each test (passed, failed or skipped, and why), once for each report that has it.

    A module that is skipped as a whole stands for its tests, by its own name.
    """
    outcomes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for path in paths:
        for case in ElementTree.parse(path).iter("testcase"):
            name = ".".join(filter(None, (case.get("classname"), case.get("name"))))
            skipped = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                outcomes[name].append(("failed", ""))
            elif skipped is not None:
                # of a module that is skipped as a whole, the reason is at the end of a tuple with its place
                reason = (skipped.text or "").partition("Skipped: ")[2].rstrip("')\"") or skipped.get("message") or ""
                outcomes[name].append(("skipped", reason))
            else:
                outcomes[name].append(("passed", ""))
    return outcomes


def find_skipped(outcomes: dict[str, list[tuple[str, str]]]) -> dict[str, str]:
    """Return the reason of each test that was skipped wherever it was, and of each module none of whose tests ran."""
    ran = {name for name, found in outcomes.items() if any(kind != "skipped" for kind, _ in found)}
    modules = {name[:end] for name in ran for end in range(len(name)) if name[end] == "."}
    return {name: found[-1][1] for name, found in outcomes.items() if name not in ran and name not in modules}


def main(argv: list[str]) -> int:
    paths = sorted(Path(argv[0]).glob("*.xml"))
    if not paths:
        print(f"no report in {argv[0]}: run make with REPORTS={argv[0]} first", file=sys.stderr)
        return 2
    outcomes = read(paths)
    skipped = find_skipped(outcomes)
    by_reason = defaultdict(list)
    for name, reason in skipped.items():
        by_reason[reason].append(name)
    print(f"skipped in every environment ({', '.join(path.stem for path in paths)}): {len(skipped)} tests")
    for reason, names in sorted(by_reason.items()):
        print(f"  {reason}")
        for name in sorted(names):
            print(f"    {name}")
    lacking = [name for name, reason in skipped.items() if reason.startswith(NEEDS_PACKAGE)]
    for name in lacking:
        print(f"no environment has what {name} needs: {skipped[name]}")
    kinds = [{kind for kind, _ in found} for found in outcomes.values()]
    failed = sum("failed" in each for each in kinds) + len(lacking)
    passed = sum("passed" in each and "failed" not in each for each in kinds)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
