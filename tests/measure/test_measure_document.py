"""A report as Markdown and as HTML, from the same parts."""

import pytest

from scaled_mm.measure.document import Command, Heading, Image, Items, Table, Text, markdown, page

PARTS = [
    Heading(2, "A <b> title"),
    Text("`code` and **strong** & more"),
    Command("scaled-mm bench --out 'a < b'"),
    Items(["one", "`two`"]),
    Table(["name", "µs"], [["a|b", "1.00"], ["two\nlines", "2.00"]], "lr"),
]


def test_markdown_has_every_part_and_cells_stay_in_their_row():
    assert markdown(PARTS).splitlines() == [
        "## A <b> title",
        "",
        "`code` and **strong** & more",
        "",
        "`scaled-mm bench --out 'a < b'`",
        "",
        "- one",
        "- `two`",
        "",
        "| name | µs |",
        "| --- | ---: |",
        "| a\\|b | 1.00 |",
        "| two lines | 2.00 |",
    ]


def test_html_escapes_what_is_text_and_keeps_the_two_marks():
    text = page(PARTS, "a < b")
    assert "<title>a &lt; b</title>" in text and "<h2>A &lt;b&gt; title</h2>" in text
    assert "<p><code>code</code> and <strong>strong</strong> &amp; more</p>" in text and "<li><code>two</code></li>" in text
    assert "<td class=r>1.00</td>" in text and "<td class=l>a|b</td>" in text


def test_an_image_is_linked_by_markdown_and_held_by_html(tmp_path):
    path = tmp_path / "plot.png"
    path.write_bytes(b"png")
    assert markdown([Image(path, "a plot")]) == "![a plot](plot.png)\n"
    assert '<img alt="a plot" src="data:image/png;base64,cG5n">' in page([Image(path, "a plot")], "t")


def test_an_image_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        page([Image(tmp_path / "gone.png", "")], "t")
