"""Hide a pass key in a novel and ask for it, with the whole cache and with a budget: ``python examples/demo.py``.

The model is SmolLM2-135M. One so small doesn't find every key in a novel even with its full cache, and it needs the
answer begun for it. The place of the key was therefore chosen, so that the full cache and the budget both find it: of
ten places tried in this text (bfloat16), the full cache found the key in 9, a budget of 1024 in 4. So the demo shows
what is read and what that costs, not how often a budget suffices. It exits with 1 if either answer is wrong.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

NOVEL = Path(__file__).parent / "sherlock_holmes.txt"
# whole paragraphs of the novel that the model gets (6.5k tokens), and the one the key is hidden before
PARAGRAPHS, PLACE = 141, 98
KEY = "71432"
HIDDEN = f"The pass key is {KEY}. Remember it. {KEY} is the pass key."
QUESTION, BEGUN = "What is the pass key?", "The pass key is"


def hide_key(novel: str) -> str:
    """The first paragraphs of the novel, with the key among them."""
    paragraphs = novel.split("\n\n")[:PARAGRAPHS]
    return "\n\n".join([*paragraphs[:PLACE], HIDDEN, *paragraphs[PLACE:]])


def ask(document: Path, budget: list[str], options: list[str]) -> dict[str, Any]:
    """Run ``questkv ask`` as a user would and return the numbers it writes."""
    numbers = document.with_suffix(".json")
    shown = ["questkv", "ask", document.name, QUESTION, "--answer-prefix", BEGUN, "--max-new-tokens", "8", *budget]
    print(f"\n$ {subprocess.list2cmdline(shown)}", file=sys.stderr)
    command = [sys.executable, "-m", "questkv", "ask", str(document), *shown[3:], "--json", str(numbers), *options]
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(numbers.read_text(encoding="utf-8"))
    return result


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print both answers and what each cost."""
    table = Table(title=f"A pass key, {KEY}, hidden in a novel", title_justify="left")
    table.add_column("cache read")
    table.add_column("answer")
    for heading in ("ms per token", "pages read", "pages held", "share"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        right = KEY in result["answer"]
        table.add_row(
            name,
            f"[{'green' if right else 'red'}]{escape(result['answer'].splitlines()[0])}[/]",
            f"{result['ms_per_token']:.1f}",
            f"{result['pages_read']:,}",
            f"{result['pages_held']:,}",
            f"{result['pages_read'] / result['pages_held']:.1%}",
        )
    console = Console()
    console.print()
    console.print(table)
    console.print(
        "The place of the key was chosen so that the full cache finds it, and the budget too: a model this small needs "
        "its answer begun for it and doesn't find every key. Of ten places tried in this text the full cache found it "
        "in 9, a budget of 1024 in 4. Pages are summed over steps, layers and KV heads, the "
        "question's tokens and the two dense layers included.",
        highlight=False,
    )


def main() -> int:
    """Ask twice and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--budget", default="1024", help="tokens that one step may read (default: 1024)")
    args, options = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "novel_with_key.txt"
        document.write_text(hide_key(NOVEL.read_text(encoding="utf-8")), encoding="utf-8")
        print(
            f"The first {PARAGRAPHS} paragraphs of The Adventures of Sherlock Holmes, with one sentence hidden before "
            f"paragraph {PLACE + 1}:\n  {HIDDEN}",
            file=sys.stderr,
        )
        results = {
            "all of it": ask(document, ["--dense"], options),
            f"budget {args.budget}": ask(document, ["--budget", args.budget], options),
        }
    show(results)
    wrong = [name for name, result in results.items() if KEY not in result["answer"]]
    if wrong:
        print(f"demo: wrong answer with {' and with '.join(wrong)}: expected {KEY}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
