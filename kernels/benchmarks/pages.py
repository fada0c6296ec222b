"""Parts of a page that scripts write, each between two marks of its own."""


def placed(page: str, begin: str, end: str, text: str) -> str:
    """The page with `text` between its marks.

    Raises:
        `ValueError`: the page lacks one of them.
    """
    head, _, rest = page.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no {begin.strip()} and {end.strip()}")
    return head + begin + text + end + tail
