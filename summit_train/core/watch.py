"""End a run that stalls, or that a signal asks to stop."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from summit_train.core.comm import World
from summit_train.core.comm.launch import node_name
from summit_train.core.result import tell
from summit_train.core.session import leave_reason

STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
_SECONDS_BETWEEN_LOOKS = 0.01
# A rank that fails ends the others, after it has printed why. MPI may wait for ever for one that was killed.
_SECONDS_AFTER_THE_NEXT = 10.0
_SENT_BEFORE_IT_ENDS = 3


class Stopped(Exception):
    """Raised on all ranks together after one was asked to stop; what is needed to resume is saved."""


class StopRequest:
    """Set by SIGUSR2 or SIGTERM: save what is needed to resume, then leave, as soon as all ranks agree."""

    def __init__(self) -> None:
        self.signal: str | None = None
        self._interrupts = False

    def __bool__(self) -> bool:
        return self.signal is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note the signal: this is its handler."""
        self.signal = signal.Signals(number).name
        if self._interrupts:
            raise Stopped

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a request, also an earlier one, raise Stopped at once within the block: for work of one rank."""
        self._interrupts = True
        try:
            if self:
                raise Stopped
            yield
        finally:
            self._interrupts = False

    def leave(self) -> None:
        """Ignore the signals from here on: the request is met and the process ends.

        srun --kill-on-bad-exit sends SIGTERM to the ranks that are still there when the first one has left with a
        status that is not 0. One that dies of it would hide the 85 of the others.
        """
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Handle the signals within the block. The former handlers come back after it, but not after `leave`."""
        former = {number: signal.signal(number, self.receive) for number in STOP_SIGNALS}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `--ranks` starts ranks that keep them until here
        try:
            yield self
        finally:
            for number, handler in former.items():
                if signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handler)


class Ballot:
    """Lets ranks that work through separate lists leave together: when all are done, or when one is asked to stop.

    All ranks vote in each round, and none waits for the others: between two items a rank checks whether the round is
    over, and then joins the next one. So all see the same rounds, and leave after the same one.
    """

    def __init__(self, world: World, stop: StopRequest) -> None:
        self._world = world
        self._stop = stop
        self._poll: Callable[[], list[int] | None] | None = None
        self._is_over = self.is_stopped = False

    def is_over(self, *, busy: bool) -> bool:
        """Vote, or check the votes; return whether all ranks leave: none is busy, or one was asked to stop."""
        if not self._is_over:
            self._poll = self._poll or self._world.start_sum([bool(self._stop), busy])
            if (sums := self._poll()) is not None:
                num_stopped, num_busy = sums
                self._poll = None
                self.is_stopped = num_stopped > 0
                self._is_over = self.is_stopped or num_busy == 0
        return self._is_over

    def rounds(self) -> Iterator[None]:
        """Wait until all ranks leave, and yield after each round: all ranks have voted in it, so none of them hangs."""
        while not self.is_over(busy=False):
            if self._poll is None:
                yield
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def leave_if_asked(world: World, stop: StopRequest) -> None:
    """Raise Stopped on all ranks where one was asked to stop. Collective."""
    ballot = Ballot(world, stop)
    for _ in ballot.rounds():
        pass
    if ballot.is_stopped:
        raise Stopped


class Neighbour:
    """The rank before this one in a ring of all ranks, which send their state over UDP.

    Every watchdog sends a datagram to the next rank several times within the stall time. A rank that waits in a
    collective still sends; one that is stopped or cut off falls silent. Where the next rank's process has ended, its
    host refuses the datagrams. The cost does not grow with the ranks.
    """

    def __init__(self, world: World) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        on_one_node = world.local_size == world.size  # which may have several names: each rank decides alike
        self._socket.bind(("127.0.0.1" if on_one_node else "", 0))
        self._socket.setblocking(False)
        self._key = os.urandom(8)  # tells this run's datagrams from anybody else's
        port = self._socket.getsockname()[1]
        address = world.who, world.host, port, self._key.hex(), node_name(os.environ, world.host)
        ring = world.broadcast(world.gather(address))
        assert ring is not None
        self.who, _, _, key_before, self.node = ring[world.rank - 1]
        self._key_before = bytes.fromhex(key_before)
        self.who_next, host, port, _, _ = ring[(world.rank + 1) % world.size]
        self._next = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with suppress(OSError):  # a name without an address: the next rank then reports that it received nothing
            self._next.connect(("127.0.0.1" if on_one_node or host == world.host else host, port))
        self.where = ""
        self._heard: float | None = None
        self._sent = 0
        self._refused = 0.0

    def exchange(self, where: str) -> None:
        """Send where this rank is, and take in what the rank before has sent."""
        with suppress(OSError):  # no address, or no network: the next rank says that it hears nothing
            try:
                self._sent += bool(self._next.send(self._key + where.encode()[:400]))
            except ConnectionRefusedError:  # by a firewall, if from the beginning
                self._refused = self._refused or (time.monotonic() if self._sent > _SENT_BEFORE_IT_ENDS else math.inf)
        with suppress(BlockingIOError):
            while True:
                datagram = self._socket.recv(512)
                if datagram[:8] == self._key_before:
                    self.where = datagram[8:].decode(errors="replace")
                    self._heard = time.monotonic()

    def silent_seconds(self) -> float | None:
        """Return the seconds since the last message of the rank before; None without any."""
        return None if self._heard is None else time.monotonic() - self._heard

    def next_has_ended(self) -> bool:
        """True if the next rank's process ended so long ago that this one should have ended with it."""
        return bool(self._refused) and time.monotonic() - self._refused > _SECONDS_AFTER_THE_NEXT

    def is_silent(self, stall_seconds: float) -> bool:
        """True if the rank before has sent messages, but none for half the stall time."""
        return (self.silent_seconds() or 0.0) > stall_seconds / 2


class Watchdog:
    """End the run when this rank makes no progress, and say which rank is at fault.

    The most certain rank speaks first. After `seconds` without progress, a rank names the one before it if that is
    silent. A quarter later, a rank that hangs in its own data or computation names itself. Another quarter later, so
    does one that waits for the others. Without `seconds` nothing is watched. Opening it is collective.
    """

    def __init__(self, world: World, seconds: float | None) -> None:
        self._world = world
        self._seconds = seconds
        self._where = "starting"
        self._waits = False
        self._since = time.monotonic()
        self._done = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._seconds is not None:
            before = Neighbour(self._world) if self._world.size > 1 else None
            if before is not None:
                before.exchange(self._where)  # once received, a rank that is stopped at once counts as silent
            threading.Thread(target=self._watch, args=(self._seconds, before), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def at(self, where: str, *, waits: bool = False) -> None:
        """Note that this rank has just begun `where`; `waits`: it depends on the other ranks there."""
        self._where = where
        self._waits = waits
        self._since = time.monotonic()

    def _watch(self, seconds: float, before: Neighbour | None) -> None:
        woke = time.monotonic()
        while not self._done.wait(min(1.0, seconds / 8)):
            if time.monotonic() - woke > seconds / 2:
                self._since = time.monotonic()  # this process was stopped itself, and continues
            woke = time.monotonic()
            if before is not None:
                before.exchange(self._where)
            if fault := self._fault(seconds, before):
                tell(fault := f"{self._world.who}: {fault}")
                faulthandler.dump_traceback(file=sys.stderr)
                is_waiting = self._waits or (before is not None and before.next_has_ended())
                node = None if is_waiting else node_name(os.environ, self._world.host)
                if before is not None and before.is_silent(seconds):
                    node = before.node
                leave_reason(fault, 1, node)
                self._world.abort(1)

    def _fault(self, seconds: float, before: Neighbour | None) -> str | None:
        stood = time.monotonic() - self._since
        where = self._where
        text = f"no progress for {stood:.0f} s while {where}"
        if before is None:
            return text if stood > seconds else None
        if before.next_has_ended() and stood > _SECONDS_AFTER_THE_NEXT:
            return f"{text}; {before.who_next} has ended"
        silent = before.silent_seconds()
        if silent is not None and before.is_silent(seconds):
            who = f"{before.who} has been silent for {silent:.0f} s: stopped, or cut off?"
            return f"{text}; {who} Last report: {before.where}" if stood > seconds else None
        # Lower ranks first: the one that speaks ends all.
        patience = (1.5 if self._waits else 1.25) + 0.125 * self._world.rank / self._world.size
        heard = "is alive" if silent is not None else "was never heard (is UDP blocked between the hosts?)"
        return f"{text}; {before.who} {heard}" if stood > seconds * patience else None
