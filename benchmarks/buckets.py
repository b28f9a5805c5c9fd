"""Reading datasets from servers at a distance, beside the local disk and other systems, with faults, by settings.

    python benchmarks/buckets.py                          everything; needs nginx, and curl for webdataset
    python benchmarks/buckets.py --parts systems --points large/uint8 --systems ours energon --rival-python PYTHON
    python benchmarks/buckets.py --parts faults start --latency 0.03
    python benchmarks/buckets.py --parts settings --samples 2000 --bytes 50000

`systems` reads from nginx, which waits before it answers; `faults` and `start` through a proxy (`servers.py`), by HTTP
or as a bucket of S3; `settings` reads from a server in Python that waits before each answer. Servers and readers share
the cores: rates compare within one run only, requests depend on nothing but the settings. With `--json FILE`
measurements are added to those that the file holds, and the tables show medians of all of them.

The interpreter of the rivals needs torch, this package's requirements, megatron-energon, multi-storage-client, boto3,
s3fs, webdataset and mosaicml-streaming; what it does not have is left out and named.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # so that it runs by its path

from benchmarks import data, mixes, report  # noqa: E402
from benchmarks.processes import (  # noqa: E402
    BenchmarkError,
    System,
    call,
    ensure_prepared,
    systems as prepared_systems,
)
from benchmarks.servers import counts, far_nginx, nginx, proxy  # noqa: E402
from benchmarks.systems.measure import Job  # noqa: E402
from energon_bridge import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset  # noqa: E402
from energon_bridge.core.prepare import parse_patterns, prepare_dataset  # noqa: E402
from energon_bridge.core.storage import as_far, open_store  # noqa: E402
from energon_bridge.tools.check.dataset_yaml import render_dataset_yaml  # noqa: E402
from energon_bridge.tools.testing import write_shard  # noqa: E402

Record = dict[str, Any]

PARTS = ("systems", "requests", "faults", "cache", "start", "settings")
COUNTS = {"caption": 20_000, "large": 4_000}
NAMES = {
    "ours": "energon_bridge, `http://`",
    "s3": "energon_bridge, `s3://`",
    "fsspec": "energon_bridge by fsspec (s3fs)",
    "energon": "megatron-energon, `msc://`",
    "energon100": "megatron-energon, `msc://`, slices of 100",
    "mosaic": "mosaicml-streaming, `s3://`",
    "webdataset": "webdataset, `pipe:curl`",
}
OWN = ("ours", "fsspec_")
RUNNERS = {"ours": "ours", "s3": "ours", "fsspec": "fsspec_", "mosaic": "mosaic_", "webdataset": "webdataset_"}
PLACES = ("local", "near", "far")
FAULTS: dict[str, Record] = {
    "none": {},
    "1 % resets, 1 % 503, 1 % bodies cut": {"faults": {"reset": 0.01, "503": 0.01, "short": 0.01}},
    "one in a thousand stalls for 5 s": {"faults": {"stall": 0.001}},
    "1 % stall for 5 s": {"faults": {"stall": 0.01}},
    "one request is answered after 10 minutes": {"dead": 60},
    "credentials expire every 20 s": {"expire": 20.0},
    "all of these, stalls one in a thousand": {
        "faults": {"reset": 0.01, "503": 0.01, "short": 0.01, "stall": 0.001},
        "dead": 60,
        "expire": 20.0,
    },
}
_BATCH = 32


# Our loader and others, from the same server -------------------------------------------------------------------------


def environment(url: str, folder: Path) -> dict[str, str]:
    """Return what points programs at a bucket server."""
    keys = folder / "credentials"
    if not keys.exists():
        keys.write_text("[default]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    name = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
    (folder / f"{name}.yaml").write_text(
        json.dumps(
            {
                "profiles": {
                    "bench": {
                        "storage_provider": {
                            "type": "s3",
                            "options": {"base_path": "", "endpoint_url": url, "region_name": "us-east-1"},
                        },
                        "credentials_provider": {
                            "type": "S3Credentials",
                            "options": {"access_key": "key", "secret_key": "secret"},
                        },
                    }
                }
            }
        )
    )
    return {
        **{"MSC_CONFIG": str(folder / f"{name}.yaml"), "AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url},
        **{"AWS_SHARED_CREDENTIALS_FILE": str(keys), "AWS_CONFIG_FILE": "/nonexistent"},
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def address(system: str, url: str, folder: Path) -> str:
    """Return the path of a dataset for a system, behind a server if there is a URL."""
    name = f"{folder.name}-mds" if system == "mosaic" else folder.name
    if not url:
        return str(folder.with_name(name))
    if system == "webdataset":
        last = len(list(folder.glob("*.tar"))) - 1
        return f"pipe:curl -sf {url}/{name}/shard_{{00000..{last:05d}}}.tar"
    return f"{url if system == 'ours' else 'msc://bench' if system.startswith('energon') else 's3:/'}/{name}"


def systems(options: argparse.Namespace, folder: Path) -> Iterator[Record]:
    """Measure throughput of each system at each place."""
    known = {
        name: System(
            name=name,
            python=sys.executable if name in ("ours", "s3") else options.rival_python or "",
            runner=f"benchmarks.systems.{RUNNERS.get(name, 'energon')}",
        )
        for name in options.systems
    }
    chooser = random.Random()
    for point in options.points:
        kind, mode = point.split("/")
        path = dataset(options, kind)
        with servers(options, path.parent) as urls:
            turns = [(name, place) for name in known for place in options.places if (name, place) != ("s3", "local")]
            for name, place in chooser.sample(turns * options.repetitions, len(turns) * options.repetitions):
                if not known[name].python:
                    continue
                if name == "mosaic":
                    with_shards(known[name], path)
                job = Job(
                    task="throughput",
                    path=address(name, urls.get(place, ""), path),
                    mode=mode,
                    part="jpg",
                    workers=options.workers,
                    batch_size=_BATCH,
                    shuffle_buffer_size=100,
                    slice_size=100 if name == "energon100" else None,
                    seconds=options.seconds,
                    warmup_seconds=options.warmup,
                    warmup_batches=options.warmup_samples // _BATCH if RUNNERS.get(name) in OWN else 0,
                    least_batches=options.least_samples // _BATCH if RUNNERS.get(name) in OWN else 0,
                )
                found = run(known[name], job, environment(urls["far" if place == "local" else place], folder))
                if found is not None:
                    yield {"point": point, "place": place, "system": name} | found


def run(system: System, job: Job, more: dict[str, str]) -> Record | None:
    """Run one job in a fresh process; None, and a line for people, if the system cannot."""
    command = [system.python, "-m", system.runner, json.dumps({name: getattr(job, name) for name in job.__slots__})]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | more, capture_output=True, text=True, timeout=300)
    if done.returncode:
        print(f"{system.name} cannot read {job.path}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def dataset(options: argparse.Namespace, kind: str) -> Path:
    """Return a prepared dataset of JPEG images with captions."""
    folder = data.make(options.cache, data.KINDS[kind], max(256, int(COUNTS[kind] * options.scale)))
    ensure_prepared(prepared_systems(sys.executable, "")["ours"], folder, data.KINDS[kind])
    return folder


def with_shards(mosaic: System, folder: Path) -> None:
    out = folder.with_name(f"{folder.name}-mds")
    if not out.exists():
        call([mosaic.python, "-m", mosaic.runner, "write", str(folder), str(out)])


@contextlib.contextmanager
def servers(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, str]]:
    """Serve a folder without and with latency."""
    with far_nginx(folder, 0.0) as near, far_nginx(folder, options.latency) as far:
        yield {"near": near, "far": far}


def table_of_systems(records: list[Record], latency: float) -> Iterator[str]:
    for point in dict.fromkeys(one["point"] for one in records):
        yield f"\n`{point}`:\n"
        far = f"{latency * 1e3:.0f} ms"
        yield f"| system | samples/s: local | no latency | {far} | CPU us a sample: local | no latency | {far} |"
        yield "|---|---|---|---|---|---|---|"
        for system, name in NAMES.items():
            found = {
                (place, figure): median(
                    one[figure]
                    for one in records
                    if (one["point"], one["place"], one["system"]) == (point, place, system)
                )
                for place in PLACES
                for figure in ("samples_per_s", "cpu_us_per_sample")
            }
            if any(value is not None for value in found.values()):
                rates = [shown(found[place, "samples_per_s"]) for place in PLACES]
                cpu = [shown(found[place, "cpu_us_per_sample"]) for place in PLACES]
                yield f"| {name} | {' | '.join([*rates, *cpu])} |"


# Faults --------------------------------------------------------------------------------------------------------------


def faults(options: argparse.Namespace, folder: Path) -> Iterator[Record]:
    """Read so many samples under faults; the digest of keys and bytes must be that of the run without."""
    path = dataset(options, "large")
    with nginx(path.parent) as port:
        for _ in range(options.repetitions):
            for name in options.faults:
                how = FAULTS[name]
                with proxy(port, folder=str(path.parent), latency=options.latency, seed=options.seed, **how) as url:
                    more = environment(url, folder)
                    with rotating(Path(more["AWS_SHARED_CREDENTIALS_FILE"]), 20.0 if how.get("expire") else 0.0):
                        what = {"path": f"s3://{path.name}", "workers": options.workers}
                        what |= {"samples": options.faulty, "warm_up": options.warmup_samples}
                        command = [sys.executable, __file__, "--read", json.dumps(what)]
                        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True)
                    if done.returncode:
                        raise BenchmarkError(done.stderr)
                    yield {"faults": name, "seen": counts(url)} | json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def rotating(path: Path, seconds: float) -> Iterator[None]:
    """Keep a file of credentials, with a key that is renewed every so many seconds."""
    if not seconds:
        yield
        return
    before = path.read_text()
    write = (
        "import os, sys, time\nwhile True:\n"
        " open(sys.argv[1] + '.new', 'w').write(f'[default]\\naws_access_key_id = key-{time.time():.3f}\\n"
        "aws_secret_access_key = secret\\n')\n os.replace(sys.argv[1] + '.new', sys.argv[1])\n"
        " print('', flush=True)\n time.sleep(float(sys.argv[2]))"
    )
    with subprocess.Popen([sys.executable, "-c", write, str(path), str(seconds)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            yield
        finally:
            writer.terminate()
            path.write_text(before)


def read(
    path: str, workers: int, samples: int, rank: int = 0, ranks: int = 1, raw: bool = False, warm_up: int = 0
) -> Record:
    """Read so many samples; return digest and counters of all, rate and longest wait of those after a warm-up."""
    config = WorkerConfig(rank=rank, world_size=ranks, num_workers=workers)
    encoder = Bytes() if raw else DefaultTaskEncoder()
    dataset = get_train_dataset(path, batch_size=_BATCH, worker_config=config, task_encoder=encoder)
    digest, slowest = hashlib.blake2b(), 0.0
    with closing(get_savable_loader(dataset)) as loader:
        stream = iter(loader)
        next(stream)
        began = last = time.perf_counter()
        for number, batch in enumerate(islice(stream, (warm_up + samples) // _BATCH)):
            if number == warm_up // _BATCH:
                began, slowest = last, 0.0
            digest.update(repr(batch.__key__).encode())
            for image in batch.image:
                digest.update(image if raw else image[0, 0, :8].contiguous().numpy())
            slowest, last = max(slowest, time.perf_counter() - last), time.perf_counter()
        took, found = last - began, loader.metrics()
    names = ("requests", "request_retries", "request_hedges", "request_bytes", "stalled_reads")
    counters = {name: found.get(name, 0) for name in names}
    return {"samples_per_s": samples / took, "slowest_batch_s": slowest, "digest": digest.hexdigest()[:16], **counters}


def table_of_faults(records: list[Record]) -> Iterator[str]:
    yield "\n| faults | samples/s | of the rate without | longest wait, s | requests | tried again | hedged | order |"
    yield "|---|---|---|---|---|---|---|---|"
    plain = [one for one in records if one["faults"] == "none"]
    base = median(one["samples_per_s"] for one in plain)
    for name in dict.fromkeys(one["faults"] for one in records):
        own = [one for one in records if one["faults"] == name]
        rate = median(one["samples_per_s"] for one in own)
        figures = [median(one[each] for one in own) for each in ("requests", "request_retries", "request_hedges")]
        same = all(one["digest"] == plain[0]["digest"] for one in own) if plain else False
        share = f"{rate / base:.2f}" if base and rate else ""
        slowest = max(one["slowest_batch_s"] for one in own)
        yield (
            f"| {name} | {shown(rate)} | {share} | {slowest:.1f} | {' | '.join(map(shown, figures))} | "
            f"{'identical' if same else 'DIFFERENT'} |"
        )


# Requests ------------------------------------------------------------------------------------------------------------


def requests(options: argparse.Namespace, folder: Path) -> Iterator[Record]:
    """Give the CPU time of this process for a request of some sizes, the least of five rounds."""
    path, chooser = dataset(options, "large"), random.Random(0)
    files = {file.name: file.stat().st_size for file in path.glob("*.tar")}
    with nginx(path) as port:
        store = as_far(open_store(f"http://127.0.0.1:{port}"))
        assert store is not None
        for kib, count in ((80, 640), (1024, 128)):
            spent = []
            for _ in range(5):
                names = chooser.choices(sorted(files), k=count)
                wanted = [(name, [chooser.randrange(files[name] - (kib << 10))], [kib << 10]) for name in names]
                before = time.process_time()
                for low in range(0, count, 64):
                    store.read_all(wanted[low : low + 64])
                spent.append((time.process_time() - before) / count)
            yield {"kib": kib, "cpu_us": min(spent) * 1e6}


def table_of_requests(records: list[Record]) -> Iterator[str]:
    yield "\n| KiB of a request | CPU us |\n|---|---|"
    for kib in dict.fromkeys(one["kib"] for one in records):
        yield f"| {kib:,} | {shown(median(one['cpu_us'] for one in records if one['kib'] == kib))} |"


# The cache of a node -------------------------------------------------------------------------------------------------


def cache(options: argparse.Namespace, folder: Path) -> Iterator[Record]:
    """Read an epoch with the ranks of a node, which share an empty cache; then with a cap of a tenth of the data."""
    path = dataset(options, "large")
    total = sum(file.stat().st_size for file in path.glob("*.tar*"))
    epoch = max(256, int(COUNTS["large"] * options.scale))
    with nginx(path.parent) as port:
        for ranks, cap in ((1, 0), (2, 0), (4, 0), (2, total // 10)):
            with proxy(port, latency=options.latency) as url:
                more = {"ENERGON_CACHE_DIR": tempfile.mkdtemp(dir=folder)}
                more |= {"ENERGON_CACHE_BYTES": str(cap)} if cap else {}
                found, expected = (
                    of_ranks(where, ranks, epoch // ranks, env)
                    for where, env in ((f"{url}/{path.name}", more), (str(path), {}))
                )
                yield {
                    "ranks": ranks,
                    "cap": cap / total,
                    "requests": counts(url)["requests"],
                    "fetched": sum(one["request_bytes"] for one in found) / total,
                    "hedged": sum(one["request_hedges"] for one in found),
                    "same": [one["digest"] for one in found] == [one["digest"] for one in expected],
                }


def of_ranks(path: str, ranks: int, samples: int, more: dict[str, str]) -> list[Record]:
    """Read by several ranks at once; return what each has found."""
    what = {"path": path, "workers": 1, "samples": samples, "ranks": ranks, "raw": True}
    commands = [[sys.executable, __file__, "--read", json.dumps(what | {"rank": rank})] for rank in range(ranks)]
    running = [subprocess.Popen(one, env=os.environ | more, stdout=subprocess.PIPE, text=True) for one in commands]
    found = [one.communicate()[0] for one in running]
    if any(one.returncode for one in running):
        raise BenchmarkError(f"{path} cannot be read by {ranks} ranks")
    return [json.loads(output.splitlines()[-1]) for output in found]


def table_of_caches(records: list[Record]) -> Iterator[str]:
    yield "\n| ranks | limit of the cache | requests of all | fetched bytes by bytes | hedged | keys and bytes |"
    yield "|---|---|---|---|---|---|"
    for one in records:
        cap = f"{one['cap']:.0%} of the data" if one["cap"] else "none"
        same = "those of the local run" if one["same"] else "DIFFERENT"
        figures = f"{one['requests']:,} | {one['fetched']:.3f} | {one['hedged']:,.0f}"
        yield f"| {one['ranks']} | {cap} | {figures} | {same} |"


# The first batch of a mix --------------------------------------------------------------------------------------------


def start(options: argparse.Namespace, folder: Path) -> Iterator[Record]:
    """Start a mix as nobody has started it before, and again; here and behind a server."""
    path = mixes.make_all(options.cache, [options.datasets])[options.datasets]
    system = prepared_systems(sys.executable, "")["ours"]
    with nginx(path.parents[1]) as port, proxy(port, folder=str(path.parents[1]), latency=options.latency) as url:
        bucket = f"{path.parent.name}/{path.name}"
        for _ in range(options.repetitions):
            for place in options.starts:
                home = tempfile.mkdtemp(dir=folder)
                shutil.rmtree(f"{path}.cache", ignore_errors=True)
                where = {"local": str(path), "http": f"{url}/{bucket}", "s3": f"s3://{bucket}"}[place]
                job = Job(
                    task="start",
                    path=where,
                    mode="raw",
                    part="json",
                    workers=options.workers,
                    batch_size=_BATCH,
                    shuffle_buffer_size=100,
                    slice_size=100,
                    consumed_batches=1,
                    seconds=1.0,
                    warmup_seconds=0.0,
                )
                for turn in ("first", "later"):
                    before = counts(url).get("requests", 0) if place != "local" else 0
                    found = run(system, job, environment(url, folder) | {"XDG_CACHE_HOME": home})
                    if found is not None:
                        asked = counts(url).get("requests", 0) - before if place != "local" else 0
                        yield {"place": place, "start": turn, "datasets": options.datasets, "requests": asked} | found


def table_of_starts(records: list[Record]) -> Iterator[str]:
    yield "\n| datasets | where | first start, s | later starts, s | requests of a later start |"
    yield "|---|---|---|---|---|"
    for place in dict.fromkeys(one["place"] for one in records):
        own = [one for one in records if one["place"] == place]
        times = {turn: [one for one in own if one["start"] == turn] for turn in ("first", "later")}
        first, later = (median(one["first_batch_s"] for one in times[turn]) for turn in ("first", "later"))
        asked = median(one["requests"] for one in times["later"])
        yield f"| {own[0]['datasets']:,} | {place} | {first or 0:.2f} | {later or 0:.2f} | {shown(asked)} |"


# Settings ------------------------------------------------------------------------------------------------------------


_SERVE = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from object_server import ObjectServer
server = ObjectServer(Path(sys.argv[2]))
server.latency = float(sys.argv[3])
print(server.url, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
"""


class Bytes(DefaultTaskEncoder):
    """Leaves the parts as they are."""

    decoder = None


def write(folder: Path, samples: int, size: int, shards: int) -> None:
    """Write a dataset of so many samples of so many bytes."""
    folder.mkdir()
    rng, each = random.Random(0), samples // shards
    for shard in range(shards):
        parts = {f"{shard:03d}_{number:06d}": {"bin": rng.randbytes(size)} for number in range(each)}
        write_shard(folder / f"{shard:04d}.tar", parts)
    yaml = render_dataset_yaml("TextSample", {"text": "bin"})
    prepare_dataset(folder, split=parse_patterns(["train:.*"]), dataset_yaml=yaml)


def measure(
    place: Any, workers: int, samples: int, slices: int | None = None, warm_up: int = 0
) -> tuple[float, float, float]:
    """Return requests and fetched bytes of a sample over so many samples, and samples per second.

    Reading is ahead by some rounds of all lanes: without a warm-up these count, too.
    """
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    dataset = get_train_dataset(
        place, batch_size=_BATCH, worker_config=config, task_encoder=Bytes(), max_samples_per_sequence=slices
    )
    with closing(get_savable_loader(dataset)) as loader:
        stream = iter(loader)
        for _ in islice(stream, 1 + warm_up // _BATCH):
            pass
        before = loader.metrics() if warm_up else {"samples": 0}
        began = time.perf_counter()
        for _ in islice(stream, samples // _BATCH):
            pass
        took, found = time.perf_counter() - began, loader.metrics()
    made = found["samples"] - before["samples"]
    asked, fetched = (found.get(name, 0) - before.get(name, 0) for name in ("requests", "request_bytes"))
    return asked / made, fetched / made, samples // _BATCH * _BATCH / took


def settings(options: argparse.Namespace) -> Iterator[str]:
    """Give the rows of the table of shards, slices, workers and the node's cache."""
    samples = options.samples
    yield "| shards | longest slice | workers | node cache | requests a sample | fetched bytes by bytes | samples/s |"
    yield "|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for shards in (1, 8, 64):
            write(Path(folder, str(shards)), samples, options.bytes, shards)
        command = [sys.executable, "-c", _SERVE, str(REPOSITORY / "tests" / "helpers"), folder, str(options.latency)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            cases: list[tuple[int, int | None, int, str]] = [(shards, None, 2, "") for shards in (1, 8, 64)]
            cases += [(8, 1, 2, ""), (8, None, 0, "")]
            cases += [(8, None, 2, "empty"), (8, None, 2, "full")]
            for shards, slices, workers, cache in cases:
                if cache:
                    os.environ["ENERGON_CACHE_DIR"] = f"{folder}/cache"
                asked, fetched, rate = measure(
                    f"{url}/{shards}", workers, samples, slices, 0 if cache else samples // 2
                )
                where = f"{shards} | {slices or 'any'} | {workers} | {cache or 'none'}"
                yield f"| {where} | {asked:.3f} | {fetched / options.bytes:.2f} | {rate:,.0f} |"
            _, rate = measure(Path(folder, "8"), 2, samples)[1:]
            yield f"| 8 | any | 2 | on this disk | 0 | 0 | {rate:,.0f} |"
            assert server.stdin is not None
            server.stdin.close()


# ---------------------------------------------------------------------------------------------------------------------


def median(values: Any) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def shown(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--points", nargs="+", default=["large/uint8", "caption/uint8", "large/raw"])
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--faulty", type=int, default=8000, help="samples of a run with faults")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--datasets", type=int, default=1000, help="in the mix that is started")
    parser.add_argument("--starts", nargs="+", default=["local", "http", "s3"], choices=["local", "http", "s3"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--latency", type=float, default=0.03)
    parser.add_argument("--seconds", type=float, default=5.0, help="at least this long a point")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds before the measured ones")
    help_text = "so many at least, of ours: a round of each lane, 64 x 128, so that reading goes on evenly"
    parser.add_argument("--warmup-samples", type=int, default=8192, help=help_text)
    parser.add_argument("--least-samples", type=int, default=8192, help="measured at least, of ours: whole rounds")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help=f"times {COUNTS} samples")
    parser.add_argument("--samples", type=int, default=2000, help="of the part `settings`")
    parser.add_argument("--bytes", type=int, default=50_000, help="of a sample of the part `settings`")
    parser.add_argument("--cache", type=Path, default=REPOSITORY / ".cache" / "bench", help="where data is written")
    parser.add_argument("--rival-python", help="an interpreter with the rivals; without, only ours are measured")
    parser.add_argument("--json", type=Path, help="add all measurements to this file")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    return parser.parse_args()


WITH_RECORDS = {"systems": systems, "requests": requests, "faults": faults, "cache": cache, "start": start}


def main() -> None:
    """Measure, and print the tables."""
    options = arguments()
    if options.read:
        print(json.dumps(read(**json.loads(options.read))))
        return
    results: dict[str, list[Record]] = {part: [] for part in PARTS}
    if options.json and options.json.exists():
        results |= json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory(prefix="energon-buckets-") as folder:
        for part in options.parts:
            if part == "settings":
                continue
            for found in WITH_RECORDS[part](options, Path(folder)):
                print(json.dumps({"part": part} | found), file=sys.stderr, flush=True)
                results[part].append(found)
                if options.json:
                    options.json.write_text(json.dumps(results, indent=1))
    print(f"{datetime.date.today().isoformat()}, {report.machine()}")
    for line in [
        *table_of_systems(results["systems"], options.latency),
        *(table_of_requests(results["requests"]) if results["requests"] else ()),
        *(table_of_faults(results["faults"]) if results["faults"] else ()),
        *(table_of_caches(results["cache"]) if results["cache"] else ()),
        *(table_of_starts(results["start"]) if results["start"] else ()),
    ]:
        print(line)
    if "settings" in options.parts:
        for line in settings(options):
            print(line, flush=True)


if __name__ == "__main__":
    main()
