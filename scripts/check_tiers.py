"""Fail unless at least one test passed in each tier: a tier that ran nothing proves nothing.

python scripts/check_tiers.py [--no-skips] REPORT.xml TIER ...

With --no-skips, a skipped test is a failure too: where everything is installed, none has a reason to be.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter


def main() -> None:
    """Read the report and judge."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-skips", action="store_true")
    parser.add_argument("report")
    parser.add_argument("tiers", nargs="+")
    arguments = parser.parse_args()
    passed: Counter[str] = Counter()
    skipped: list[str] = []
    for case in ElementTree.parse(arguments.report).iter("testcase"):
        outcomes = {child.tag: child.get("message", "") for child in case}
        if "skipped" in outcomes:
            skipped.append(f"{case.get('classname')}.{case.get('name')}: {outcomes['skipped']}")
        elif not {"failure", "error"} & set(outcomes):
            passed[case.get("classname", "").split(".")[1]] += 1
    print("passed:", ", ".join(f"{tier} {passed[tier]}" for tier in arguments.tiers))
    empty = [tier for tier in arguments.tiers if not passed[tier]]
    if empty:
        sys.exit(f"no test passed in: {', '.join(empty)}")
    if arguments.no_skips and skipped:
        sys.exit("\n".join(["skipped, though everything should be here:", *skipped]))


if __name__ == "__main__":
    main()
