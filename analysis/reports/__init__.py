"""The report: one page from run folders, as HTML and as Markdown.

`report` builds it. Its sentences come from `first_screen`, `cautions`, `trust`, `findings` and
`fidelity_findings`; its cells from `tables`; `parts` is what they are gathered in.
Whether arms are beyond their capacity is judged in `keeping_up`. Numbers are made elsewhere.
"""
