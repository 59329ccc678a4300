"""Lesson 11: the tiles of a matrix, a block of threads each."""


def tiled(rows, columns, tile, across, entry):
    down = -(-rows // tile)

    def inside(block, thread):
        row, column = entry(block, thread)
        return (row, column) if row < rows and column < columns else None

    return down * across, inside


def launch(rows, columns, tile):
    across = -(-columns // tile)

    def entry(block, thread):
        return (
            block // across * tile + thread // tile,
            block % across * tile + thread % tile,
        )

    return tiled(rows, columns, tile, across, entry)


def rounds_down(rows, columns, tile):
    """What does not fill a tile is forgotten."""
    across = columns // tile
    blocks = rows // tile * across

    def entry(block, thread):
        return (
            block // across * tile + thread // tile,
            block % across * tile + thread % tile,
        )

    return blocks, entry


def without_the_edge(rows, columns, tile):
    """Threads beyond the edge write, too."""
    across = -(-columns // tile)

    def entry(block, thread):
        return (
            block // across * tile + thread // tile,
            block % across * tile + thread % tile,
        )

    return -(-rows // tile) * across, entry


def along_columns(rows, columns, tile):
    """All entries, but neighbouring threads read from rows that lie far apart."""
    across = -(-columns // tile)

    def entry(block, thread):
        return (
            block // across * tile + thread % tile,
            block % across * tile + thread // tile,
        )

    return tiled(rows, columns, tile, across, entry)


solution = launch
MISTAKES = {
    rounds_down: "rows 5, columns 3, tile 2: 2 blocks, where 6 are needed.",
    without_the_edge: "is outside of C.",
    along_columns: "Neighbouring threads read far apart",
}
