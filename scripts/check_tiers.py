"""Fail unless at least one test passed in each tier: a tier that ran nothing proves nothing.

python scripts/check_tiers.py REPORT.xml TIER ...
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter


def count_passed(report: str) -> Counter[str]:
    """Passed tests by tier, the folder below tests/."""
    passed: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        if not any(child.tag in ("skipped", "failure", "error") for child in case):
            passed[case.get("classname", "").split(".")[1]] += 1
    return passed


def main() -> None:
    """Read the report and judge."""
    report, *tiers = sys.argv[1:]
    passed = count_passed(report)
    print("passed:", ", ".join(f"{tier} {passed[tier]}" for tier in tiers))
    empty = [tier for tier in tiers if not passed[tier]]
    if empty:
        sys.exit(f"no test passed in: {', '.join(empty)}")


if __name__ == "__main__":
    main()
