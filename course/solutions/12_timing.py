"""Lesson 12: rounds in alternating order, and the median of their ratios."""

from statistics import mean, median


def seconds(function, clock):
    start = clock()
    function()
    return clock() - start


def times_as_fast(f, g, clock, rounds=60):
    ratios = []
    for turn in range(rounds):
        if turn % 2:
            of_f, of_g = seconds(f, clock), seconds(g, clock)
        else:
            of_g, of_f = seconds(g, clock), seconds(f, clock)
        ratios.append(of_g / of_f)
    return median(ratios)


def one_after_the_other(f, g, clock):
    of_f = median(seconds(f, clock) for _ in range(50))
    return median(seconds(g, clock) for _ in range(50)) / of_f


def by_the_mean(f, g, clock):
    times = [(seconds(f, clock), seconds(g, clock)) for _ in range(50)]
    return mean(g for _, g in times) / mean(f for f, _ in times)


def upside_down(f, g, clock):
    return 1 / times_as_fast(f, g, clock)


solution = times_as_fast
MISTAKES = {
    one_after_the_other: "on a machine that becomes slower",
    by_the_mean: "on a machine with hiccups",
    upside_down: "instead of 2.00 on a quiet machine",
}
