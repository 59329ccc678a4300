"""Derives the constants of aten/src/ATen/native/cpu/AttnTanh.h; prints them as they stand there.

With --check, compares the header with them, and exits 1 with the first that differs. They belong
to minimax approximations in relative error, found by Remez' second algorithm.
"""

from __future__ import annotations

import argparse
import math
import re
import struct
import sys
import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from mpmath import (
    atanh,
    cos,
    fabs,
    floor,
    frexp,
    linspace,
    log,
    lu_solve,
    matrix,
    mp,
    mpf,
    pi,
    sqrt,
    tanh,
)


HEADER = Path(__file__).resolve().parent.parent / "aten/src/ATen/native/cpu/AttnTanh.h"
FORMAT = {"float": "f", "double": "d"}
mp.dps = 40

Function = Callable[[mpf], mpf]


def rounded(x: mpf, kind: str) -> mpf:
    """x as a number of this kind, float or double."""
    return mpf(struct.unpack(FORMAT[kind], struct.pack(FORMAT[kind], float(x)))[0])


def evaluate(coefficients: Sequence[mpf], x: mpf) -> mpf:
    """sum_i coefficients[i] x**i"""
    result = mpf(0)
    for c in reversed(coefficients):
        result = result * x + c
    return result


def shifted(coefficients: Sequence[mpf], by: mpf) -> list[mpf]:
    """The coefficients in x - by of the polynomial that has these in x."""
    result = list(coefficients)
    for i in range(len(result)):
        for j in reversed(range(i, len(result) - 1)):
            result[j] += by * result[j + 1]
    return result


def nodes(low: mpf, high: mpf, n: int) -> list[mpf]:
    """n points of [low, high], the ends among them, denser towards the ends."""
    return [(low + high - (high - low) * cos(pi * i / (n - 1))) / 2 for i in range(n)]


def turns(error: Function, points: Sequence[mpf], n: int) -> list[tuple[mpf, mpf]]:
    """n of the points, with the error there: alternately its greatest and its least."""
    result: list[tuple[mpf, mpf]] = []
    for x in points:
        e = error(x)
        if result and (e > 0) == (result[-1][1] > 0):
            if fabs(e) > fabs(result[-1][1]):
                result[-1] = x, e
        else:
            result.append((x, e))
    while len(result) > n:
        result.pop(0 if fabs(result[0][1]) < fabs(result[-1][1]) else -1)
    if len(result) < n:
        raise ValueError(f"the error has {len(result)} extrema, not {n}")
    return result


def polynomial(
    f: Function, low: mpf, high: mpf, degree: int, weight: Function, grid: int = 120
) -> list[mpf]:
    """p with the least maximum of |p - f| / weight on [low, high]."""
    n = degree + 2
    points, reference = nodes(low, high, grid), nodes(low, high, n)
    while True:
        # p(x) + (-1)^i e weight(x) = f(x) in the i-th point of reference
        a, b = matrix(n), matrix(n, 1)
        for i, x in enumerate(reference):
            for j in range(degree + 1):
                a[i, j] = x**j
            a[i, degree + 1] = (-1) ** i * weight(x)
            b[i] = f(x)
        *p, e = lu_solve(a, b)
        extrema = turns(lambda x, p=p: (evaluate(p, x) - f(x)) / weight(x), points, n)
        reference = [x for x, _ in extrema]
        if max(fabs(e) for _, e in extrema) < fabs(e) * 1.001:
            return p


def rational(high: mpf, degree_p: int, degree_q: int) -> tuple[list[mpf], list[mpf]]:
    """p and q with the least maximum of |x p(x²) / (q(x²) tanh(x)) - 1| for 0 < x <= high.

    p(0) = q(0), and the leading coefficient of q is 1.
    """
    n = degree_p + degree_q + 1
    points = nodes(mpf(0), high, 400)[1:]
    reference = nodes(mpf(0), high, n + 1)[1:]
    q, e = [mpf(1)] + degree_q * [mpf(0)], mpf(0)
    while True:
        # Newton's iteration for p(u) = (1 + s e) f(u) q(u), where p(0) = q(0) = 1, s = (-1)^i
        for _ in range(20):
            a, b = matrix(n), matrix(n, 1)
            for i, x in enumerate(reference):
                u, s = x * x, (-1) ** i
                f = (1 + s * e) * tanh(x) / x
                for j in range(degree_p):
                    a[i, j] = u ** (j + 1)
                for j in range(degree_q):
                    a[i, degree_p + j] = -f * u ** (j + 1)
                a[i, n - 1] = -s * tanh(x) / x * evaluate(q, u)
                b[i] = f - 1
            *c, step = lu_solve(a, b)
            p, q = [mpf(1), *c[:degree_p]], [mpf(1), *c[degree_p:]]
            e += step
            if fabs(step) < fabs(e) / 10**9:
                break

        def error(x, p=p, q=q):
            return evaluate(p, x * x) / evaluate(q, x * x) * x / tanh(x) - 1

        extrema = turns(error, points, n)
        reference = [x for x, _ in extrema]
        if max(fabs(e) for _, e in extrema) < fabs(e) * 1.001:
            return [x / q[-1] for x in p], [x / q[-1] for x in q]
        e = math.copysign(1, extrema[0][1]) * fabs(e)


class Interval(NamedTuple):
    """Those |x| for which the leading bits of y = scale |x| + bias are the same."""

    index: int
    low: mpf
    high: mpf


class Intervals(NamedTuple):
    """Of [0, top]: ``steps`` of them to a power of two of y. They are ``size`` in all, and
    the index is made of as many of y's bits, exponent and fraction, as that takes."""

    size: int
    steps: int
    scale: str
    bias: str
    top: str

    def __iter__(self):
        scale, bias, top = mpf(self.scale), mpf(self.bias), mpf(self.top)
        y, end = bias, scale * top + bias
        while y < end:
            _, exponent = frexp(y)  # of a fraction of at least 1/2
            step = mpf(2) ** (exponent - 1) / self.steps
            # An exponent is stored as exponent - 2 + a power of two, and a fraction less its 1.
            index = (exponent - 2) * self.steps + int(y / step) - self.steps
            following = (floor(y / step) + 1) * step
            yield Interval(
                index % self.size,
                (y - bias) / scale,
                (min(following, end) - bias) / scale,
            )
            y = following


class Constant(NamedTuple):
    kind: str
    values: list[list[mpf]]


def polynomials(intervals: Intervals, degree: int) -> Constant:
    """For each interval a point c, then the coefficients of a polynomial in |x| - c."""
    columns = {}
    for index, low, high in intervals:
        if low == 0:
            # x + x² p(x), so that tanh(x) = x where x is tiny
            p = polynomial(
                lambda x: (tanh(x) - x) / x**2,
                high / 1000,
                high,
                degree - 2,
                lambda x: tanh(x) / x**2,
            )
            columns[index] = [mpf(0), mpf(0), mpf(1), *p]
            continue
        middle = (low + high) / 2

        def f(t, middle=middle):
            return tanh(middle + t)

        p = polynomial(f, low - middle, high - middle, degree, f)
        # The constant term is what costs most to round: of the points near the middle the one
        # where that is least.
        points = [
            rounded(x, "float")
            for x in linspace(middle * 63 / 64, middle * 65 / 64, 129)
        ]
        values = [evaluate(p, c - middle) for c in points]
        errors = [fabs(rounded(y, "float") - y) / y for y in values]
        c = points[errors.index(min(errors))]
        columns[index] = [c, *shifted(p, c - middle)]
    return table("float", columns, intervals.size)


def table(kind: str, columns: dict[int, list[mpf]], size: int) -> Constant:
    """The columns in the order of their indices; an index that does not occur has zeros."""
    rows = zip_longest(*(columns.get(i, []) for i in range(size)), fillvalue=mpf(0))
    return Constant(kind, [[rounded(x, kind) for x in row] for row in rows])


def one_row(kind: str, values: Sequence[mpf]) -> Constant:
    return Constant(kind, [[rounded(x, kind) for x in values]])


def addition(intervals: Intervals, degree: int) -> tuple[Constant, Constant]:
    """For each interval c, T = tanh(c), 1 - T²; and r, where s = tanh(t) = t + t³ r(t²), for

    tanh(c + t) = T + (1 - T²) s / (1 + T s)
    """
    columns = {}
    reach = []
    for index, low, high in intervals:
        if low < 0.5:
            c, T = mpf(0), mpf(0)
        else:
            # The correction to T is not as exact as T: it is to be small against the result,
            # which matters most in the first of these intervals.
            middle = (
                atanh((tanh(low) + tanh(high)) / 2) if low < 1 else (low + high) / 2
            )
            width = (high - low) / 64
            points = [
                rounded(x, "double")
                for x in linspace(middle - width, middle + width, 2001)
            ]

            def cost(c):
                T = tanh(c)
                d = 1 - T * T
                return fabs(rounded(T, "double") - T) / T + fabs(
                    rounded(d, "double") - d
                )

            c = min(points, key=cost)
            T = tanh(c)
        columns[index] = [c, T, 1 - T * T]
        reach.append((c, T, low - c, high - c))

    def weight(u):
        # What relative error of s makes one of the result in the interval where that is worst.
        worst = mpf(0)
        for t in (sqrt(u), -sqrt(u)):
            s = tanh(t)
            for c, T, low, high in reach:
                if low <= t <= high:
                    worst = max(
                        worst, fabs(s) * (1 - T * T) / (1 + T * s) ** 2 / tanh(c + t)
                    )
        t = sqrt(u)
        return tanh(t) / t / u / worst

    high = max(max(-low, high) for _, _, low, high in reach) ** 2
    r = polynomial(
        lambda u: (tanh(sqrt(u)) / sqrt(u) - 1) / u,
        high / 4000,
        high,
        degree,
        weight,
        grid=400,
    )
    return table("double", columns, intervals.size), one_row("double", r)


def odd(kind: str, high: mpf, degree: int) -> Constant:
    """p, where tanh(r) = r + r³ p(r²) for |r| <= high."""
    p = polynomial(
        lambda u: (tanh(sqrt(u)) / sqrt(u) - 1) / u,
        high**2 / 1000,
        high**2,
        degree,
        lambda u: tanh(sqrt(u)) / sqrt(u) / u,
    )
    return one_row(kind, p)


def derive() -> dict[str, Constant]:
    """All constants, by name, in the order of the header."""
    angles, series = addition(Intervals(16, 8, "0.915", "6.455", "19.1"), degree=11)
    # |x| = n L + r, where n is an integer of five bits.
    L = log(2) / 2
    first = floor(L * 2**43) / 2**43
    quotient = rational(mpf("5.5"), degree_p=2, degree_q=3)
    return {
        "attn_tanh_avx512": polynomials(
            Intervals(32, 8, "1", "0.625", "9.2"), degree=4
        ),
        "attn_tanh_log_float": one_row("float", [1 / L, L]),
        "attn_tanh_float": odd("float", L / 2, degree=2),
        "attn_tanh_p": one_row("float", quotient[0]),
        "attn_tanh_q": one_row("float", quotient[1]),
        "attn_tanh_angles": angles,
        "attn_tanh_series": series,
        "attn_tanh_log_double": one_row("double", [1 / L, first, L - first]),
        "attn_tanh_double": odd("double", L * 3 / 4, degree=6),
    }


def literal(x: mpf, kind: str) -> str:
    text = f"{float(x):.{9 if kind == 'float' else 17}g}"
    if not re.search("[.e]", text):
        text += "."
    return text + ("f" if kind == "float" else "")


def definition(name: str, constant: Constant) -> str:
    """As C++."""
    kind, rows = constant
    lists = [", ".join(literal(x, kind) for x in row) for row in rows]
    size = f"[{len(rows[0])}]"
    if len(rows) == 1:
        body = textwrap.fill(
            lists[0], 80, initial_indent="    ", subsequent_indent="    "
        )
    else:
        size = f"[{len(rows)}]{size}"
        body = "\n".join(
            textwrap.fill(
                f"{{{row}}},", 80, initial_indent="    ", subsequent_indent="     "
            )
            for row in lists
        )
    align = "alignas(64) " if len(rows) > 1 else ""
    return f"{align}constexpr {kind} {name}{size} = {{\n{body}\n}};"


def difference(name: str, constant: Constant, header: str) -> str | None:
    """Where the header's definition of this constant is another one, if it is."""
    text = definition(name, constant)
    if text in header:
        return None
    found = re.search(rf"constexpr \w+ {name}\b.*?;", header, re.DOTALL)
    if not found:
        return f"{name} is not defined"
    number = r"[-+]?\d[\w.]*(?:(?<=e)[-+]\d+f?)?"
    theirs, ours = (re.findall(number, x.partition("=")[2]) for x in (found[0], text))
    for i, (x, y) in enumerate(zip_longest(theirs, ours)):
        if x != y:
            row, column = divmod(i, len(constant.values[0]))
            place = f"[{row}][{column}]" if len(constant.values) > 1 else f"[{column}]"
            return f"{name}{place} is {x}, not {y}"
    return f"{name} has the right numbers in another form"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="compare the header instead"
    )
    check = parser.parse_args().check
    constants = derive()
    if not check:
        print("\n\n".join(definition(*item) for item in constants.items()))
        return 0
    header = HEADER.read_text()
    for item in constants.items():
        if error := difference(*item, header):
            print(f"{HEADER.name}: {error}")
            return 1
    print(f"{HEADER.name}: {len(constants)} constants as derived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
