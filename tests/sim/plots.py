"""Plots of streaming.json: TTFT and quality against bandwidth, requests over budget against the budget.

usage: plots.py streaming.json OUT.png      needs matplotlib

Each point of the first and last row is a trace at a scale, requests that come alone at a budget of
BUDGET_S; lines are medians of tenths of them by bandwidth. The row between sums over all traces and scales.
"""

import json
import statistics
import sys
from collections import defaultdict

BUDGET_S = 2
N_GROUPS = 10
POLICIES = {
    "ttft_budget": "C0", "paper": "C3", "L3": "C2", "L1": "C4", "recompute": "C7", "oracle": "black",
}  # fmt: skip


def medians(points):
    """(x, y) of equal groups of the points by x: [(median x, median y)]."""
    points = sorted(points)
    groups = [points[len(points) * i // N_GROUPS : len(points) * (i + 1) // N_GROUPS] for i in range(N_GROUPS)]
    return [tuple(statistics.median(column) for column in zip(*group)) for group in groups if group]


def against_bandwidth(axis, rows, key, label):
    for policy, color in POLICIES.items():
        points = [
            (r["mean_mbps"], r[key]) for r in rows if r["policy"] == policy and r["budget_s"] == BUDGET_S and r[key]
        ]
        if not points:
            continue
        axis.scatter(*zip(*points), s=6, color=color, alpha=0.25)
        axis.plot(*zip(*medians(points)), color=color, label=policy)
    axis.set(xscale="log", yscale="log", xlabel="mean bandwidth, Mbit/s", ylabel=label)


def against_budget(axis, rows):
    for policy, color in POLICIES.items():
        over, could = defaultdict(float), defaultdict(float)
        for r in rows:
            if r["policy"] == policy:
                over[r["budget_s"]] += r["over_budget"] * r["could"]
                could[r["budget_s"]] += r["could"]
        shares = [(budget, 100 * over[budget] / could[budget]) for budget in sorted(could) if could[budget]]
        axis.plot(*zip(*shares), marker="o", color=color, label=policy)
    axis.set(xscale="log", xlabel="budget, s", ylabel="over budget, % of those that could be in it", ylim=(-2, 100))
    budgets = sorted({r["budget_s"] for r in rows})
    axis.set_xticks(budgets, labels=[f"{b:g}" for b in budgets], minor=False)
    axis.set_xticks([], minor=True)


def main(source, target):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with open(source) as file:
        rows = [r for r in json.load(file)["rows"] if "mean_mbps" in r]
    models = list(dict.fromkeys(r["model"] for r in rows))
    figure, axes = pyplot.subplots(3, len(models), figsize=(6 * len(models), 13), squeeze=False)
    for column, model in enumerate(models):
        of_model = [r for r in rows if r["model"] == model]
        against_bandwidth(axes[0][column], of_model, "ttft_mean_s", f"mean TTFT, s (budget {BUDGET_S} s)")
        against_budget(axes[1][column], of_model)
        against_bandwidth(axes[2][column], of_model, "mean_kl_in_budget", f"predicted KL in budget ({BUDGET_S} s)")
        axes[0][column].axhline(BUDGET_S, color="C7", linestyle=":")
        axes[0][column].set_title(model)
        for axis in axes[:, column]:
            axis.grid(True, alpha=0.3)
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=90)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
