"""The ratios that must hold, and the tables. Every figure is a median over one run's rounds."""

from __future__ import annotations

PEER, PEER_SHM, TCP, SHM = "mooncake", "mooncake-daemon", "cenote", "cenote-shm"
MEMMOVE, RAW_TCP = "memmove shm 2.5MiB GB/s", "raw tcp request/response 2.5MiB GB/s"

# Single blocks are told by the median call on both sides ("p50_GBps"), as the physical limits are:
# a total would count the first call after a pause, and whatever else the machine did, on one side.
# (work, ours, (section, case), field, denominator peer or physical limit, "<=" or ">=", must, aim)
RATIOS = [
    ("get_into 4 KiB, location unknown", TCP, "get_into 4KiB", "p50_us", PEER, "<=", 0.65, 0.4),
    ("get_into 4 KiB, location unknown", SHM, "get_into 4KiB", "p50_us", PEER_SHM, "<=", 0.25, 0.1),
    (
        "get_into 4 KiB, location cached",
        TCP,
        "get_into 4KiB cached",
        "p50_us",
        PEER,
        "<=",
        0.4,
        0.25,
    ),
    (
        "get_into 4 KiB, location cached",
        SHM,
        "get_into 4KiB cached",
        "p50_us",
        PEER_SHM,
        "<=",
        0.12,
        0.05,
    ),
    ("put_from 4 KiB", TCP, "put_from 4KiB", "p50_us", PEER, "<=", 0.9, 0.5),
    ("put_from 4 KiB", SHM, "put_from 4KiB", "p50_us", PEER_SHM, "<=", 0.5, 0.2),
    ("small metadata call, TCP lane", TCP, "is_exist", "p50_us", PEER, "<=", 0.8, 0.25),
    ("small metadata call, Unix lane", SHM, "is_exist", "p50_us", PEER, "<=", 0.4, 0.15),
    ("get_into 2.5 MiB", TCP, "get_into 2.5MiB", "p50_GBps", RAW_TCP, ">=", 0.8, 1.0),
    ("get_into 2.5 MiB", SHM, "get_into 2.5MiB", "p50_GBps", PEER_SHM, ">=", 1.4, 2.0),
    ("get_into 2.5 MiB", SHM, "get_into 2.5MiB", "p50_GBps", MEMMOVE, ">=", 0.8, 1.0),
    ("batch get 2.5 MiB x 64", TCP, "get 2.5MiB x64", "GBps", RAW_TCP, ">=", 0.9, 1.0),
    ("batch get 2.5 MiB x 64", SHM, "get 2.5MiB x64", "GBps", PEER_SHM, ">=", 1.05, 1.3),
    ("batch put 2.5 MiB x 64", TCP, "put 2.5MiB x64", "GBps", RAW_TCP, ">=", 0.6, 0.8),
    ("batch put 2.5 MiB x 64", SHM, "put 2.5MiB x64", "GBps", PEER_SHM, ">=", 1.0, 1.2),
    (
        "batch get 4 KiB x 256, keys/s",
        TCP,
        "get 4KiB x256",
        "items_per_s",
        None,
        ">=",
        150e3,
        300e3,
    ),
    ("batch get 4 KiB x 256", SHM, "get 4KiB x256", "items_per_s", PEER_SHM, ">=", 1.8, 4.0),
    ("exists, batch 512", TCP, "batch_is_exist 512", "items_per_s", "better", ">=", 4.0, 8.0),
    ("exists, batch 512", SHM, "batch_is_exist 512", "items_per_s", "better", ">=", 4.0, 8.0),
    ("put 64 B, batch 128", SHM, "put_small b=128 clients=1", "per_s", PEER_SHM, ">=", 1.8, 3.0),
    ("master bytes per object", SHM, "million", "bytes_per_key", None, "<=", 320, 100),
    ("left after removing all, %", SHM, "million", "left_all_pct", None, "<=", 40, 40),
    ("left after removing the oldest 90 %", SHM, "million", "left_oldest_pct", None, "<=", 40, 40),
]


def compute(rows, limits) -> list[dict]:
    values = {}
    for row in rows:
        case = "million" if row["section"] == "million" else row["case"]
        values[row["peer"], case] = row

    def value(peer, case, field):
        return values.get((peer, case), {}).get(field)

    table = []
    for work, ours, case, field, against, sign, must, aim in RATIOS:
        mine = value(ours, case, field)
        if against is None:
            base = 1.0
        elif against == "better":
            both = [value(p, case, field) for p in (PEER, PEER_SHM)]
            base = max((v for v in both if v), default=None)
        elif against in limits:
            base = limits[against]
        else:
            base = value(against, case.removesuffix(" cached"), field)
        ratio = mine / base if mine is not None and base else None
        holds = None if ratio is None else (ratio <= must if sign == "<=" else ratio >= must)
        table.append(
            {
                "work": work,
                "transport": "tcp" if ours == TCP else "shm",
                "ours": mine,
                "against": against or "",
                "base": base if against else None,
                "ratio": ratio,
                "must": f"{sign} {must:g}",
                "aim": aim,
                "holds": holds,
            }
        )
    return table


def _cell(row) -> str:
    if row is None:
        return "-"
    if "error" in row:
        return "ERR " + row["error"][:24]
    if "per_s" in row:
        return f"{row['per_s']:,.0f}/s"
    if "missing" in row and not row["n"]:
        return f"all of {row['missing']} missing"
    if "bytes_per_key" in row:
        return f"{row['bytes_per_key']:.0f} B/key, {row['left_all_pct']:.0f} % left"
    text = f"{row['p50_us']:.0f}({row['best_p50_us']:.0f})/{row['p99_us']:.0f}us"
    if row["GBps"] > 0:
        text += f" {row['GBps']:.2f}({row['best_GBps']:.2f})GB/s"
    else:
        text += f" {row['items_per_s']:,.0f}/s"
    if "missing" in row:
        return f"{text} {row['ssd_reads']} from SSD, {row['missing']} missing"
    if "refused" in row:
        return f"{text} {row['refused']} refused"
    return text + f" c{row.get('best_cpu_us_per_call', 0):.0f}"


def print_report(result, labels) -> None:
    print(f"# {result['time']}  {result['machine']}  {result['seconds']} s  load {result['load']}")
    for name, limit in result["physical"].items():
        print(f"limit   {name:42s} {limit:.2f}")
    print("# p50 median (best)/p99, throughput median (best), c = CPU us per call, all processes")
    print(f"{'section':8s}{'case':30s}" + "".join(f"{name:42s}" for name in labels))
    cases: dict[tuple, dict] = {}
    for row in result["rows"]:
        cases.setdefault((row["section"], row["case"]), {})[row["peer"]] = row
    for (section, case), by_peer in cases.items():
        cells = "".join(f"{_cell(by_peer.get(name)):42s}" for name in labels)
        print(f"{section:8s}{case:30s}{cells}")
    print("\n# yardsticks")
    for y in result["yardsticks"]:
        if y["ratio"] is None:
            continue
        verdict = "holds" if y["holds"] else "MISSED"
        base = f"{y['base']:12.2f}" if y["base"] is not None else " " * 12
        print(
            f"{y['work']:38s}{y['transport']:4s}{y['ours']:14.2f} {base} {y['against']:38s}"
            f"{y['ratio']:10.2f}  must {y['must']:9s} aim {y['aim']:<8g} {verdict}"
        )
    for error in result["errors"]:
        print("ERROR", error)
    for what in result["skipped"]:
        print("skipped (over the time budget):", what)
