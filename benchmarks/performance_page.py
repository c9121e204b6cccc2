"""Writes the tables of ``docs/performance.md``: ``python benchmarks/performance_page.py [--aot]``.

Between ``<!-- name -->`` and ``<!-- end -->`` the page holds what the tools print: ``prediction``
is ``gpu_suite.py --predict``; with ``--aot`` also one table per target, of the kernels that
multiply, as ``python -m moe_triton.aot`` makes it (a minute or two each).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gpu_suite import prediction  # noqa: E402
from suite.machine import use_checkout  # noqa: E402

PAGE = HERE.parent / "docs" / "performance.md"


def with_section(text: str, name: str, body: str) -> str:
    """Raises ``ValueError`` where the page has no such section, or several."""
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(\n<!-- end -->)"
    made, times = re.subn(pattern, lambda m: m[1] + body + m[2], text, flags=re.DOTALL)
    if times != 1:
        raise ValueError(f"{PAGE.name} has {times} sections {name!r}: it needs one")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--aot", action="store_true", help="compile, and write those tables too")
    args = parser.parse_args()
    text = with_section(PAGE.read_text(encoding="utf-8"), "prediction", prediction())
    if args.aot:
        use_checkout()
        from moe_triton import aot

        for name in aot.TARGETS:
            found = [one for one in aot.compile_cases(name) if one.needs_tiles]
            text = with_section(text, name, aot.table(found))
            print(name, flush=True)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
