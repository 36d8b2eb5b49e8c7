"""From rows to what they say: means, bytes at equal KL divergence, a table and a plot."""

import math
from collections import defaultdict

PLANNED = "planned"  # levels that begin so are plans
REFERENCE = "published"
REFERENCE_LEVELS = ("default", "finest")  # at whose KL others are compared
_MEASURES = ("bits_per_element", "kl", "delta_nll", "top1")


def means(rows):
    """The rows of each model, part, codec and level in one: bits over all elements, the others over the texts."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["model"], row["part"], row["codec"], row["level"]].append(row)
    result = []
    for (model, part, codec, level), found in groups.items():
        mean = {name: sum(row[name] for row in found) / len(found) for name in _MEASURES}
        n_tokens = sum(row["tokens"] for row in found)
        mean["bits_per_element"] = sum(row["bits_per_element"] * row["tokens"] for row in found) / n_tokens
        result.append({"model": model, "part": part, "codec": codec, "level": level, "n_texts": len(found), **mean})
    return result


def _series(found):
    """{codec: {level: (bits, KL)}} of means, L0 left out; what is planned is a series of its own, between the codec's
    finest and coarsest level."""
    result = defaultdict(dict)
    for m in found:
        if m["kl"] > 0:
            is_plan = m["level"].startswith(PLANNED)
            result[m["codec"] + f", {PLANNED}" * is_plan][m["level"]] = (m["bits_per_element"], m["kl"])
    for name in [name for name in result if name.endswith(PLANNED)]:
        levels = result[name.split(",")[0]].items()
        result[name] |= {level: point for level, point in levels if level in ("L1", "L3")}
    return result


def bits_at(points, kl):
    """(bits per element at kl, None), log-log between the two points (bits, KL) around it; or (bits of the nearest
    point, which side of all points kl lies on: "below" or "above")."""
    points = sorted((k, b) for b, k in points)
    if kl < points[0][0]:
        return points[0][1], "below"
    if kl > points[-1][0]:
        return points[-1][1], "above"
    for (k0, b0), (k1, b1) in zip(points, points[1:]):
        if k0 < k1 and kl <= k1:
            share = math.log(kl / k0) / math.log(k1 / k0)
            return b0 * (b1 / b0) ** share, None
    return points[-1][1], None


def _compare(rows, about):
    """How many times fewer bytes than the reference each codec takes at the KL of the reference's levels."""
    curves = _series(rows)
    reference, result = curves.pop(REFERENCE, {}), []
    for level in REFERENCE_LEVELS:
        if level not in reference:
            continue
        bits, kl = reference[level]
        for codec, points in curves.items():
            if len(points) < 2:
                continue
            found, outside = bits_at(points.values(), kl)
            row = {**about, "codec": codec, "at": f"KL of {REFERENCE} {level}", "kl": kl, "reference_bits": bits}
            if outside is None:
                row |= {"bits_per_element": found, "times_fewer": bits / found}
            elif outside == "above":  # the codec's worst level is still better than that, in fewer bits
                row |= {"at_least": bits / found, "note": f"{codec} has no level as bad as this"}
            else:
                row |= {"note": f"{codec} has no level as good as this"}
            result.append(row)
    return result


def ratios(rows):
    """_compare() of the means of each model and part, and of each left-out domain."""
    groups = defaultdict(list)
    for row in means(rows):
        groups[row["model"], row["part"], "all texts"].append(row)
    domains = defaultdict(list)
    for row in rows:
        if row["part"] == "domains":
            domains[row["domain"], row["model"]].append(row)
    for (domain, model), found in domains.items():
        groups[model, "domains", domain] = means(found)
    result = []
    for (model, part, domain), found in groups.items():
        result += _compare(found, {"model": model, "part": part, "texts": domain})
    return result


def _table(head, lines):
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *lines]) + "\n"


def markdown(result):
    """The whole result as tables."""
    by_part = ", ".join(f"{part} {commit}" for part, commit in result["commits"].items())
    parts = [f"# Quality\n\n{result['hardware']}. Commits by part: {by_part}.\n"]
    titles = {
        "size": "Size and quality",
        "domains": "Out of domain: each calibration text left out in turn, and tested on",
    }
    for part, title in titles.items():
        lines = [
            [m["model"], m["codec"], m["level"], str(m["n_texts"]), f"{m['bits_per_element']:.3f}",
             f"{16 / m['bits_per_element']:.1f}", f"{m['kl']:.5f}", f"{m['delta_nll']:+.4f}", f"{m['top1']:.3f}"]
            for m in result["means"] if m["part"] == part
        ]  # fmt: skip
        if lines:
            head = ["model", "codec", "level", "texts", "bits/element", "16 bits / it", "KL", "dNLL", "top-1"]
            parts.append(f"## {title}\n\n{_table(head, lines)}")
    lines = [
        [r["model"], r["part"], r["texts"], r["codec"], r["at"], f"{r['kl']:.4f}",
         f"{r['times_fewer']:.2f}" if "times_fewer" in r else
         (f"at least {r['at_least']:.2f}: " if "at_least" in r else "") + r["note"]]
        for r in result["ratios"]
    ]  # fmt: skip
    if lines:
        head = ["model", "part", "texts", "codec", "at", "KL", "times fewer bytes"]
        parts.append(f"## Times fewer bytes at equal KL\n\n{_table(head, lines)}")
    lines = []
    for t in result["tasks"]:
        score, n = f"{t['score']:.3f}", f"{t['n_cases']} ({t['n_skipped']} too long)"
        if t["codec"] == "none":
            told = [score + ("" if t["reported"] else ": too low, not reported"), "", "16"]
        else:
            told = [score, f"{t['same_answer']:.3f}", f"{t['bits_per_element']:.3f}"]
        lines.append([t["model"], t["task"], n, t["codec"], t["level"], *told])
    if lines:
        head = ["model", "task", "cases", "codec", "level", "score", "same answer", "bits/element"]
        parts.append(f"## Tasks\n\n{_table(head, lines)}")
    parts.append("".join(f"- {note}\n" for note in result["notes"]))
    return "\n".join(parts)


def plot(result, path):
    """Bits per element against KL, both log: a panel for each model and part, a curve for each codec."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((m["model"], m["part"]) for m in result["means"]))
    if not panels:
        return
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6 * len(panels), 5), squeeze=False)
    for axis, panel in zip(axes[0], panels):
        for codec, points in _series(m for m in result["means"] if (m["model"], m["part"]) == panel).items():
            axis.plot(*zip(*sorted(points.values())), marker="o", label=codec)
        axis.set(xscale="log", yscale="log", title=", ".join(panel), xlabel="bits per element", ylabel="KL divergence")
        limits = axis.get_xlim()
        axis.set_xticks([2.0**i for i in range(-3, 5)], labels=[f"{2.0**i:g}" for i in range(-3, 5)], minor=False)
        axis.set_xticks([], minor=True)
        axis.set_xlim(limits)
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
