"""The table of recipes and systems that is kept with this package. Nothing here imports torch or Megatron.

`python tests/tools/recipe_table.py` keeps it anew, which takes half an hour; a test holds a sample of it against what
`plan` says.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from bridge_fgo.tools.job import kept_files

FILE = Path(__file__).with_name("recipe_table.json.gz")
"""Has `versions` of what it is of, the names of its `systems`, and `rows` by recipe. A row has its `gpus`, the peaks
`resident` and `offloaded` of the fullest rank in bytes, whether activations are `counted` in them, and `cells`, a word
a system; or `why` there are none; or the name that it is `as`."""
UNKNOWN = "?"  # a cell of which `plan` gives no verdict, or a close call


def lines(words: Sequence[str] = ()) -> Iterator[str]:
    """Yield the table's lines, of the recipes whose names have each of the words; ValueError if there are none."""
    table = kept_files.read(FILE)
    rows = {name: row for name, row in table["rows"].items() if all(word.lower() in name for word in words)}
    if not rows:
        raise ValueError(f"no recipe's name has {' and '.join(words)}")
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    yield f"What `bridge-fgo plan` said with {versions}, as this table was made:"
    width = max(map(len, rows))
    heads = ("GPUs", "resident", "offload", *table["systems"])
    yield f"{'recipe':{width}}  {_cells(heads)}"
    for name, row in rows.items():
        of = table["rows"][row["as"]] if "as" in row else row
        told = of.get("why")
        if told is None:
            peaks = (f"{'' if of['counted'] else '>'}{of[peak] / 1e9:.1f}" for peak in ("resident", "offloaded"))
            told = _cells((str(of["gpus"]), *peaks, *of["cells"]))
        yield f"{name:{width}}  {told}"
    yield (
        f"\nGB on the fullest GPU at peak, resident and all offloaded (> without activations, which are not counted); "
        f"{UNKNOWN}: it depends on them, or is a close call. Activations of experts on several ranks, and in FP8, are "
        "not held against runs. What a recipe's name says of a GPU is not binding."
    )


def _cells(cells: Sequence[str]) -> str:
    return " ".join(f"{cell:>8}" for cell in cells)
