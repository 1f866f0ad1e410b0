"""Reads a report's page."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects what a page loads, links to, and says."""

    def __init__(self, text):
        super().__init__()
        self.loads, self.links, self.tags, self.text = [], [], set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        attributes = dict(attrs)
        if tag == "a":
            self.links.append(attributes["href"])
        else:
            self.loads += [attributes[name] for name in ("src", "href", "srcset", "data") if name in attributes]

    def handle_data(self, data):
        self.text += data.replace("\u00a0", " ")
