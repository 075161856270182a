from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def drafts_whatever_they_cost() -> Iterator[None]:
    """The embedded engine drafts wherever it finds something, so that what a test sees does not hang on the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("april.engines.embedded.drafts.WORTH", 0.0)
        patch.setattr("april.engines.embedded.drafts.FEWEST", 0.0)
        yield
