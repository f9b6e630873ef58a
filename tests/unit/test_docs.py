"""What the documents promise: links that lead somewhere, and a line for each error that a user can meet."""

import re
from pathlib import Path

import pytest

from sglang_recv.errors import RecvError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path for folder in (ROOT, ROOT / "docs", ROOT / "patches", ROOT / "tests" / "slime") for path in folder.glob("*.md")
)


def anchors(path: Path) -> set[str]:
    """The names that a renderer gives to headings: lower case, words joined by hyphens, other signs dropped."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_slime_users_find_every_error_code():
    table = (ROOT / "docs" / "slime.md").read_text()
    assert [kind.code for kind in RecvError.__subclasses__() if f"`{kind.code}`" not in table] == []
