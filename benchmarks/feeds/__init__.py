"""Feeds of several libraries doing the same work, for ``benchmarks/peers.py``.

Every ``feed_*.py`` has ``open_feed(case, folder, variant)``, a context manager that gives an endless iterator of
``(samples, labels)``, and ``VARIANTS``. ``child.py`` runs one of them in a process of its own. What a peer's process
imports from here needs nothing of the product: it runs in the peers' environment.
"""
