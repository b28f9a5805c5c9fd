"""The report of a run, a page in HTML: what was delivered, losses, waiting, failures.

`recorder` collects during the run, `page` writes it, and `callback` does both under Lightning.
"""
