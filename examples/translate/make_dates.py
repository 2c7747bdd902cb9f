"""Write a file of pairs, parted by tabs: dates as people write them, and the same as ISO 8601.

`python make_dates.py runs/pairs` writes `dates.tsv` there. To translate something else, put your own pairs into a
folder.
"""

from __future__ import annotations

import datetime as dt
import random
import sys
from pathlib import Path

FORMS = ("%d %B %Y", "%B %d, %Y", "%d.%m.%Y")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pairs")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
    draw = random.Random(0)
    first = dt.date(1950, 1, 1)
    pairs: dict[str, str] = {}
    while len(pairs) < count:
        date = first + dt.timedelta(days=draw.randrange(36_500))
        pairs[date.strftime(draw.choice(FORMS))] = date.isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dates.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs.items()))
    source, target = next(iter(pairs.items()))
    print(f"{len(pairs):,} pairs in {folder / 'dates.tsv'}, such as {source} -> {target}")


if __name__ == "__main__":
    main()
