"""Every causal language model class of transformers gives transformers' own answer, or a true refusal."""

from __future__ import annotations

import pytest
import transformers

from sweep import table
from sweep.probe import outcome

pytestmark = [pytest.mark.sweep, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("model_type", table.names())
def test_a_class_works_or_is_refused_as_the_documentation_says(model_type: str) -> None:
    found = outcome(model_type)
    assert found.kind != "not built" or model_type in table.NOT_BUILT, f"not built: {found.reason}"
    if table.version() == transformers.__version__:
        assert table.row(model_type, found) == table.written()[model_type], "run `make models`"


def test_the_documentation_has_a_line_for_every_class_and_counts_them() -> None:
    if table.version() != transformers.__version__:
        pytest.skip(f"docs/models.md is transformers {table.version()}'s, this is {transformers.__version__}")
    lines = table.written()
    assert list(lines) == list(table.names())
    works, refused = (sum(f"| {what} |" in line for line in lines.values()) for what in ("works", "refused"))
    text = table.MODELS.read_text()
    assert f"Of the {len(lines)} model types" in text
    assert f"{works} work, {refused} are refused, and {len(lines) - works - refused} could not be tried" in text
