"""The report: one page from run folders, as HTML and as Markdown.

`report` builds the page. Its sentences come from `first_screen` (with `keeping_slo`, `observed` for values of the
user's metrics, and `one_arm` where nothing is compared), `cautions`, `trust`, `findings` and `fidelity_findings`, and
its table cells from `tables`; `parts` has the data structures. `keeping_up` judges whether arms are beyond their
capacity. The numbers are computed in other packages.
"""
