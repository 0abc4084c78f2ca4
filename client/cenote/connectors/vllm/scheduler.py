"""The half that lives beside vLLM's scheduler: finds prefixes, says what workers do. Never waits.

It knows vLLM's requests by what it reads of them (`RequestLike`), so that it is tested without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, final

import numpy as np

from cenote.api.errors import Unavailable
from cenote.api.types import AcquiredLease
from cenote.client import Namespace
from cenote.runtime.log import get_logger

from .breaker import CircuitBreaker
from .counters import Counters
from .fetches import Fetch, FetchLimits, Found, Phase, Want
from .groups import Block, Grouping
from .keys import key_suffixes
from .link import REFUSALS, PoolLink
from .lookups import Lookup, LookupThread, find
from .options import ConnectorOptions
from .orders import LoadOrder, Orders, Reports, SpaceName, StageOrder, StageReport
from .pace import ComputePace
from .places import NOWHERE, SOURCES, HostView
from .requests import Known, RequestLike
from .residency import Change
from .residency_watch import ResidencyWatch
from .saves import SaveProgress
from .variants import Variant, Variants, with_suffix

__all__ = ["RequestLike", "StoreScheduler"]

_log: Final = get_logger("cenote.vllm")
_BYTES_PER_S: Final = 200e6
"""Slower than this is not worth waiting for."""
_HOLD_S: Final = 10.0
_CLOSE_S: Final = 2.0


@final
class StoreScheduler:
    """See the module's docstring. All calls are of the scheduler's thread."""

    def __init__(
        self,
        options: ConnectorOptions,
        grouping: Grouping,
        shards: Sequence[int],
        ranks: int,
        block_bytes: dict[int, int],
        make_space: Callable[[], SpaceName | None],
        link: PoolLink,
        counters: Counters,
    ) -> None:
        """`block_bytes`: of one block by group, at one rank. `make_space`: names the model's
        namespace, which may take long; None: nothing is shared."""
        self._options = options
        self._grouping = grouping
        self._shards = sorted(set(shards))
        self._ranks = ranks
        self._block_bytes = block_bytes
        self._make_space = make_space
        self._space: SpaceName | None = None
        self._link = link
        self._counters = counters
        self._pace = ComputePace()
        self._limits = FetchLimits(
            lookup_s=options.lookup_deadline_s,
            transfer_s=options.load_deadline_s,
            bytes_per_s=_BYTES_PER_S,
            hold_s=_HOLD_S,
            gain_tokens_min=options.load_min_tokens,
            compute_share=options.load_share,
            pace=self._pace,
        )
        self._breaker = CircuitBreaker()
        self._lookups = LookupThread(self._find)
        self._known: dict[str, Known] = {}
        self._fetches: dict[int, tuple[str, Fetch[AcquiredLease]]] = {}
        """By ticket, until over."""
        self._staging: dict[int, StageReport] = {}
        self._stage_blocks: dict[int, tuple[Block, ...]] = {}
        self._next_ticket = 1
        self._variants = Variants()
        self._view = HostView()
        self._watch: ResidencyWatch | None = None
        self._orders = Orders()
        self._refused = False
        self._collected = False
        """Answers were taken in the step that is being planned."""

    # ---- life --------------------------------------------------------------------------------

    def start(self) -> None:
        self._link.start()
        self._lookups.start()
        self._lookups.submit(self._name_space)

    def watch_residency(self) -> int | None:
        """Keep books of which blocks of a group of full attention are on this host, for
        `residency_changes`. The group's number; None: there is no such group."""
        number = self._grouping.main
        if number < 0:
            return None
        suffixes = key_suffixes(number, self._shards)
        self._watch = ResidencyWatch(number, suffixes, self._open, self._lookups.submit, self._view)
        return number

    def residency_changes(self) -> list[Change]:
        """What has changed since the last call."""
        return [] if self._watch is None else self._watch.poll(time.monotonic())

    def _open(self, deadline_s: float) -> Namespace | None:
        """In the lookups' thread."""
        return None if self._space is None else self._link.space(self._space, deadline_s)

    def close(self) -> None:
        self._lookups.close(_CLOSE_S)
        self._link.close()

    def _name_space(self) -> None:
        self._space = self._make_space()
        if self._space is not None:
            _log.info("this model's blocks", namespace=self._space.name)

    # ---- requests ----------------------------------------------------------------------------

    def new_request(self, request: RequestLike, adapter_path: str | None = None) -> None:
        """It has come in: its prompt is looked up already, long before its turn.

        `adapter_path`: where the adapter (LoRA) lies that it is for.
        """
        known = Known(request, self._variant(adapter_path), preemptions=request.num_preemptions)
        self._known[request.request_id] = known
        if self._options.load:
            self._begin(known)

    def _variant(self, adapter_path: str | None) -> Variant:
        variants = self._variants
        variant = variants.of(adapter_path)
        if variant.suffix is None:  # before its lookup, in the same thread
            self._lookups.submit(lambda: variants.resolve(variant))
        return variant

    def reset(self) -> None:
        """The engine's weights have changed in place: nothing that was saved before is found any
        more by this engine. What others have, and do, is not touched."""
        self._variants.renew()
        if self._watch is not None:
            self._watch.clear()
        for known in self._known.values():
            fetch, request = known.fetch, known.request
            loading = fetch is not None and fetch.phase is Phase.LOADING
            if fetch is not None:
                fetch.abandon()
                self._act(request.request_id, fetch)
            if loading or request.num_computed_tokens:
                known.stale_preemptions = request.num_preemptions
            else:
                self._renew(known)

    def _renew(self, known: Known) -> None:
        known.stale_preemptions = None
        known.variant = self._variant(known.variant.adapter_path)
        known.saves = SaveProgress()

    def _stale(self, known: Known) -> bool:
        """Whether some of its blocks are of weights that have been replaced."""
        stale = known.stale_preemptions
        if stale is not None and known.request.num_preemptions > stale:
            self._renew(known)
        return known.stale_preemptions is not None

    def _begin(self, known: Known) -> None:
        """Look the prompt up, unless the pool does not answer anyway."""
        request = known.request
        now_s = time.monotonic()
        fetch: Fetch[AcquiredLease] = Fetch(self._next_ticket, now_s, self._limits)
        self._next_ticket += 1
        known.fetch = fetch
        known.preemptions = request.num_preemptions
        self._fetches[fetch.ticket] = (request.request_id, fetch)
        self._act(request.request_id, fetch)

    def matched_tokens(self, request: RequestLike, have_tokens: int) -> int | None:
        """How many tokens beyond `have_tokens` can be loaded at once; None: ask again."""
        known = self._known.get(request.request_id)
        if known is None or not self._options.load or self._stale(known):
            return 0
        if not self._collected:
            # Once while the engine plans a step: an answer that came in between would have a
            # request overtake those before it, which were asked about a moment earlier.
            self._collect()
            self._collected = True
        if known.fetch is None or (
            known.fetch.over and known.preemptions != request.num_preemptions
        ):
            self._begin(known)
        fetch = known.fetch
        assert fetch is not None
        size_bytes = 0
        if fetch.phase is Phase.FOUND and fetch.found is not None:
            size_bytes = self._size_of(self._grouping.needed(fetch.found.tokens, have_tokens))
        tokens = fetch.ask(time.monotonic(), have_tokens, size_bytes)
        self._act(request.request_id, fetch)
        return tokens

    def allocated(
        self,
        request: RequestLike,
        make_tables: Callable[[], Sequence[Sequence[int]]],
        external_tokens: int,
    ) -> None:
        """The engine gave the request blocks, of which so many tokens are to be loaded.

        `make_tables`: its block ids by group, which are as long as the prompt.
        """
        known = self._known.get(request.request_id)
        if known is None or known.fetch is None:
            return
        fetch = known.fetch
        have_tokens = fetch.tokens - external_tokens
        if fetch.allocated(external_tokens):
            blocks = self._grouping.needed(fetch.tokens, have_tokens)
            tables = make_tables()
            placed = [(block, tables[block[0]][block[1]]) for block in blocks]
            self._orders.loads.append(
                LoadOrder(
                    fetch.ticket,
                    request.request_id,
                    tuple(block for block, _ in placed),
                    tuple(block_id for _, block_id in placed),
                )
            )
            self._counters.add("loaded_tokens", external_tokens)
            known.sources = self._sources(fetch, have_tokens)
            for name, tokens in known.sources.items():
                self._counters.add(f"loaded_from_{name}", tokens)
        self._act(request.request_id, fetch)

    def _sources(self, fetch: Fetch[AcquiredLease], have_tokens: int) -> dict[str, int]:
        number = self._grouping.main
        places = None if fetch.found is None else fetch.found.places
        if places is None or number < 0:
            return {}
        size = self._grouping.group(number).block_tokens
        counts = np.bincount(places[have_tokens // size : fetch.tokens // size], minlength=NOWHERE)
        return {name: size * int(sum(counts[c] for c in codes)) for name, codes in SOURCES.items()}

    def sources(self, request: RequestLike) -> dict[str, int]:
        """Of the tokens that are being loaded for it, how many come from where."""
        known = self._known.get(request.request_id)
        return {} if known is None else known.sources

    def finished(self, request_id: str) -> None:
        """The request has ended, whatever became of it."""
        known = self._known.pop(request_id, None)
        if known is not None and known.fetch is not None:
            known.fetch.abandon()
            self._act(request_id, known.fetch)

    # ---- steps -------------------------------------------------------------------------------

    def save(
        self,
        request_id: str,
        computed_tokens: int,
        make_tables: Callable[[str], Sequence[Sequence[int]] | None],
        states: Sequence[tuple[int, int, int]],
    ) -> None:
        """After this step the request has so many tokens computed.

        `make_tables`: a request's block ids by group, None where it has none any more.
        """
        known = self._known.get(request_id)
        if known is None or (computed_tokens < known.saves.due_tokens and not states):
            return
        suffix = known.variant.suffix
        if suffix is None or not self._saving or self._stale(known):
            return
        if not self._options.save_output:
            computed_tokens = min(computed_tokens, known.request.num_prompt_tokens)
        hashes = known.request.block_hashes
        if not known.saves.due(self._grouping, hashes, computed_tokens, states):
            return
        tables = make_tables(request_id)
        if tables is None:
            return
        order = known.saves.advance(self._grouping, hashes, computed_tokens, tables, states)
        if order is not None:
            salted = replace(order, hashes=tuple(with_suffix(list(order.hashes), suffix)))
            self._orders.saves.append(salted)
            self._note(order.blocks, salted.hashes, order.hashes)

    def _note(
        self, blocks: Sequence[Block], key_hashes: Sequence[bytes], hashes: Sequence[bytes]
    ) -> None:
        """They may be on this host: see `watch_residency`."""
        watch = self._watch
        if watch is not None:
            rows = zip(blocks, key_hashes, hashes, strict=True)
            watch.note((key, own) for block, key, own in rows if block[0] == watch.number)

    @property
    def _saving(self) -> bool:
        """A pool that does not answer lookups would not take blocks either."""
        return (
            self._options.save
            and self._space is not None
            and not self._refused
            and self._link.client is not None
            and not self._breaker.is_open(time.monotonic())
        )

    def take_orders(self, tokens: int = 0) -> Orders:
        """What the workers are to do with this step, which computes so many tokens."""
        self._collect()
        self._collected = False
        now_s = time.monotonic()
        for request_id, fetch in list(self._fetches.values()):
            fetch.expire(now_s)
            self._act(request_id, fetch)
        orders, self._orders = self._orders, Orders()
        orders.space = self._space
        orders.step = self._pace.began(now_s, tokens)
        return orders

    def reported(self, reports: Reports) -> None:
        """What workers said after a step."""
        if reports.step:
            self._pace.ended(time.monotonic(), reports.step)
        for ticket, report in reports.staged.items():
            before = self._staging.get(ticket)
            if before is not None:
                report = StageReport(
                    before.ranks + report.ranks,
                    before.missing | report.missing,
                    before.size_bytes + report.size_bytes,
                )
            if report.ranks < self._ranks:
                self._staging[ticket] = report
                continue
            self._staging.pop(ticket, None)
            self._staged(ticket, report)

    def _staged(self, ticket: int, report: StageReport) -> None:
        request_id, fetch = self._fetches.get(ticket, ("", None))
        blocks = self._stage_blocks.pop(ticket, ())
        if fetch is None or fetch.found is None:
            return
        there = set(blocks) - report.missing
        tokens = self._grouping.usable_tokens(
            fetch.found.tokens, there.__contains__, fetch.from_tokens
        )
        self._counters.add("staged_bytes", report.size_bytes)
        self._counters.add("missing_blocks", len(report.missing))
        fetch.staged(time.monotonic(), tokens)
        self._act(request_id, fetch)

    def loaded(self, request_ids: Iterable[str]) -> None:
        """Loads that all workers have ended."""
        for request_id in request_ids:
            known = self._known.get(request_id)
            if known is not None and known.fetch is not None:
                known.fetch.loaded()
                self._act(request_id, known.fetch)

    # ---- doing what fetches want -------------------------------------------------------------

    def _act(self, request_id: str, fetch: Fetch[AcquiredLease]) -> None:
        while fetch.wants:
            want = fetch.wants.pop(0)
            if want is Want.LOOK_UP:
                self._look_up(request_id, fetch)
            elif want is Want.STAGE:
                self._stage(request_id, fetch)
            elif want is Want.DROP:
                self._drop(fetch.ticket)
            elif want is Want.RELEASE:
                self._release(fetch)
        if fetch.over and self._fetches.pop(fetch.ticket, None) is not None:
            assert fetch.outcome is not None
            self._staging.pop(fetch.ticket, None)
            self._stage_blocks.pop(fetch.ticket, None)
            self._counters.add(f"fetches_{fetch.outcome.value}", 1)

    def _drop(self, ticket: int) -> None:
        """Workers are told, unless they have not been told to begin."""
        orders = self._orders
        begun = [order for order in orders.stages if order.ticket != ticket]
        if len(begun) < len(orders.stages):
            orders.stages = begun
        else:
            orders.drops.append(ticket)

    def _look_up(self, request_id: str, fetch: Fetch[AcquiredLease]) -> None:
        known = self._known[request_id]
        request = known.request
        now_s = time.monotonic()
        # The last token is computed in any case: it says what comes next.
        limit_tokens = self._grouping.aligned(request.num_tokens - 1)
        if not limit_tokens or not request.block_hashes:
            fetch.looked_up(Found(0, None, 0.0))
            return
        reachable = self._space is not None and self._link.hopeful and not self._refused
        if not reachable or not self._breaker.admit(now_s):
            fetch.looked_up(None)
            return
        hashes = list(request.block_hashes[: limit_tokens // self._grouping.hash_tokens])
        until_s = now_s + self._options.lookup_deadline_s
        lookup = Lookup(fetch.ticket, hashes, limit_tokens, until_s, known.variant)
        if not self._lookups.submit(lookup):
            self._breaker.failed(now_s)
            fetch.looked_up(None)

    def _find(self, lookup: Lookup) -> Found[AcquiredLease]:
        """In the lookups' thread."""
        if self._space is None:
            raise Unavailable("the model's namespace is not known yet")
        suffix = lookup.variant.suffix
        if suffix is None:  # an adapter that nobody knows
            return Found(0, None, 0.0)
        began_s = time.monotonic()
        lookup = replace(lookup, hashes=with_suffix(lookup.hashes, suffix))
        space = self._link.space(self._space, lookup.until_s - began_s)
        found = find(
            space, self._grouping, self._shards, lookup, self._options.lease_ttl_s, self._view
        )
        self._counters.observe("lookup", time.monotonic() - began_s)
        return found

    def _collect(self) -> None:
        """Take the answers that have come in."""
        answers = self._lookups.answers
        while answers:
            answer = answers.popleft()
            now_s = time.monotonic()
            if answer.found is None:
                self._breaker.failed(now_s)
                if isinstance(answer.error, REFUSALS) and not self._refused:
                    self._refused = True
                    _log.error("the pool refuses this model's blocks", why=answer.error)
            else:
                self._breaker.succeeded()
            request_id, fetch = self._fetches.get(answer.ticket, ("", None))
            if fetch is None:
                self._release_lease(answer.found.lease if answer.found else None)
                continue
            fetch.looked_up(answer.found)
            known = self._known.get(request_id)
            if known is not None and answer.found is not None:
                known.saves.skip(self._grouping, answer.found.tokens)
            self._act(request_id, fetch)

    def _stage(self, request_id: str, fetch: Fetch[AcquiredLease]) -> None:
        assert fetch.found is not None
        known = self._known[request_id]
        hashes = known.request.block_hashes
        blocks = tuple(self._grouping.needed(fetch.found.tokens, fetch.from_tokens))
        found = [self._grouping.hash_of(block, hashes) for block in blocks]
        staged = tuple(with_suffix(found, known.variant.suffix or b""))
        self._note(blocks, staged, found)
        self._stage_blocks[fetch.ticket] = blocks
        self._orders.stages.append(
            StageOrder(
                fetch.ticket,
                blocks,
                staged,
                fetch.found.lease,
                fetch.limit_s,
            )
        )

    def _size_of(self, blocks: Iterable[Block]) -> int:
        return sum(self._block_bytes[block[0]] for block in blocks)

    def _release(self, fetch: Fetch[AcquiredLease]) -> None:
        if fetch.found is not None:
            self._release_lease(fetch.found.lease)

    def _release_lease(self, lease: AcquiredLease | None) -> None:
        space = self._space
        if lease is None or space is None:
            return

        def release() -> None:
            self._link.space(space, self._options.lookup_deadline_s).release(lease)

        self._lookups.submit(release)
