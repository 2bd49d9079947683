"""Shapes and texts of an SVG picture, on a light background of its own: readable on a dark page too."""

from xml.sax.saxutils import escape

BLUE, GREEN, ORANGE, RED, GREY = "#9ecbff", "#b4e2a8", "#ffd59a", "#ffb3ad", "#eef1f4"
TEXT, PALE, LINE, PAPER = "#1f2328", "#59636e", "#8c959f", "#ffffff"


def picture(name: str, width: float, height: float, title: str, description: str, parts: list[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' width='{width:g}' "
        f"height='{height:g}' font-family='DejaVu Sans, Verdana, sans-serif' role='img' "
        f"aria-labelledby='{name}-title {name}-text'>"
    )
    lines = [
        head,
        f"<title id='{name}-title'>{escape(title)}</title>",
        f"<desc id='{name}-text'>{escape(description)}</desc>",
        f"<rect width='{width:g}' height='{height:g}' rx='8' fill='{PAPER}'/>",
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def label(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: int = 13,
    bold: bool = False,
    color: str = TEXT,
) -> str:
    weight = " font-weight='bold'" if bold else ""
    return (
        f"<text x='{x:g}' y='{y:g}' font-size='{size}' fill='{color}' text-anchor='{anchor}'{weight}>"
        f"{escape(text)}</text>"
    )


def rectangle(x: float, y: float, width: float, height: float, fill: str, outline: str = LINE) -> str:
    return f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='3' fill='{fill}' stroke='{outline}'/>"


def arrow(x: float, y: float, end: float) -> list[str]:
    return [
        f"<path d='M {x:g} {y:g} H {end:g} m -7 -5 l 7 5 l -7 5' fill='none' stroke='{TEXT}' stroke-width='1.5'/>"
    ]
