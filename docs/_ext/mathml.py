"""A renderer of formulas as MathML, which browsers draw themselves: MathJax would have to be loaded from the network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator


def inline(writer: HTML5Translator, node: nodes.math) -> None:
    """Write a formula in a line."""
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block(writer: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula in a line of its own."""
    writer.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Make the renderer known as `mathml`."""
    app.add_html_math_renderer("mathml", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
