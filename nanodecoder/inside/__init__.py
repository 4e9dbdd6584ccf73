"""Looking inside: what flows in a pass, where each head looks, what comes and what it takes, before and after.

    import nanodecoder as nd
    found = nd.inside.trace(model, tokens, layers=[9])
    found["blocks.9.attention"], found["blocks.9.mid"], found.logits

In reading order: columns (text that lines up), trace (one pass, with a name at every place), shapes (the walk of a pass),
memory (what it takes), plan (`python -m nanodecoder plan`), pieces (ids as a reader wants to see them), odds (what the
model expected), looks (where heads look), lens (what the head would say on the way), views (all of one run), report (as HTML).
"""

from .report import render
from .shapes import walk
from .trace import Trace, trace, trace_bytes, writes
from .views import VIEWS, Asked, Views, words

__all__ = ["VIEWS", "Asked", "Trace", "Views", "render", "trace", "trace_bytes", "walk", "words", "writes"]
