"""Reads a page as a browser would, as far as its tests need it."""

from html.parser import HTMLParser
from pathlib import Path

_WITHOUT_END = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Holds the texts, tags and addresses of a page; raises AssertionError where tags are not balanced."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags, self.addresses = "", [], []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "action")]
        if tag not in _WITHOUT_END:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open, f"{tag} ends, but none is open"
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self.text += data
