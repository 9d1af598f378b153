"""The rules of the suite as data: the clause, what was seen when it is broken, what to change."""

from __future__ import annotations

from attrs import frozen


class Broken(AssertionError):
    """A rule is broken; the message is all that an author needs."""


@frozen
class Rule:
    """clause: in specs/ (S save.md, R restore.md, H hold.md, F folder.md)."""

    clause: str
    broken: str
    fix: str

    def must(self, holds: bool, seen: object = "") -> None:
        """Raises `Broken` with the whole rule if it does not hold. seen: the evidence."""
        if not holds:
            evidence = f"\n  seen: {seen}" if seen != "" else ""
            raise Broken(f"{self.clause}: {self.broken}{evidence}\n  fix: {self.fix}")


def differ(got: object, wanted: object) -> str:
    """Evidence of two states that should be equal."""
    return f"{got!r}, and not {wanted!r}"


# -- saving ------------------------------------------------------------------------------------

VISIBLE = Rule(
    "suite",
    "`observe` gives the same before and after `work`: the suite would see nothing",
    "in the test file, let `work` change something that belongs into the snapshot, and let "
    "`observe` return it",
)
NAME = Rule(
    "F5.1",
    "`name` must be a folder name and `format_version` a whole number from 1 on",
    "set both on the class: letters, digits, '_', '.', '-'; raise the number when files change",
)
DESCRIBE = Rule(
    "R2",
    "`describe` changed without a change of the topology: every restore would be refused",
    "return only what must be equal at restore (counts, kinds), no addresses, pids or times",
)
ERRORS = Rule(
    "S9",
    "a hook raised what nobody raises on purpose; that stops the trainer as a bug",
    "raise Refused(code, detail) to say no, Unavailable for a server that is away, OSError or "
    "TimeoutError for I/O, SnapshotRejected in a restore; facts are a mapping that JSON can hold",
)
SAVES = Rule(
    "S1",
    "a save without any fault did not end as Saved",
    "look at the step and the reason: this participant must let it pass",
)
HARMLESS = Rule(
    "S4",
    "a save changed the state that it saved",
    "let `prepare`, `commit` and `resume` only stop, copy and let go",
)
RELEASED = Rule(
    "S6",
    "still held after a save that is over, published or aborted",
    "let `resume` let go of everything that `pause`, `prepare`, `commit` or `cut` hold, whichever "
    "of them came; the engine calls it only if `pause` or `prepare` is overridden, so hold there",
)
CONFIRMED = Rule(
    "S6",
    "the release was not confirmed",
    "let `resume` return when everyone runs, and raise NotReleased(names) only for the silent",
)
UNCHANGED = Rule(
    "S1",
    "an aborted attempt changed the state",
    "move nothing out of the live state in `commit` or `cut`: write a copy",
)
SWEPT = Rule(
    "S1",
    "an aborted attempt left its unpublished folder behind, or somebody made it again",
    "write only through `attempt.part()`, and let `resume` stop and await a writer that still runs",
)
GOES_ON = Rule(
    "S1",
    "no work is possible any more after a save, an abort or a restore that is over",
    "let `resume` and `rollback` open every door that was closed",
)
REPEATED_RELEASE = Rule(
    "S6",
    "`resume` of a save, called again, raised or changed the state",
    "make `resume` idempotent: the engine repeats it until everyone has confirmed",
)
REPEATED = Rule(
    "H2",
    "a message that arrived twice failed the operation, or changed its result",
    "answer the same operation of the same fence again as before, without doing it twice",
)

# -- hold --------------------------------------------------------------------------------------

HELD = Rule(
    "S4",
    "not held between `prepare` and `resume`",
    "close in `prepare` (or finish closing in `drain`) and open in `resume`, nowhere else; if "
    "nothing needs to stand still here, say why in `no_hold`",
)
MOVED = Rule(
    "S4",
    "the state moved under the hold, and the snapshot was published all the same",
    "let new work wait or be refused from `prepare` on; if something moved, raise "
    'Refused("moved") from `renew`',
)
INSTANT = Rule(
    "S4",
    "what was restored is not the state at the instant of `commit` or `cut`",
    "copy the state in one synchronous step, then write the copy; restore all of it",
)
WAITING = Rule(
    "S6",
    "work that came under the hold neither went on nor was refused after the release",
    "wake everyone who waits when `resume` opens",
)
LATE = Rule(
    "H1",
    "a message that arrived after its save or restore was over holds again, and nobody will "
    "release it",
    "keep the newest fence that was released, and refuse it and every older one "
    '(Refused("stale_fence"))',
)
OVERTAKEN = Rule(
    "H1",
    "a `prepare` that its own release had overtaken holds, and nobody will release it",
    "let `resume` remember attempt.fence as closed also when nothing is held yet",
)
LATE_RELEASE = Rule(
    "H1",
    "a late release of an older attempt ended the hold of a newer one",
    "in `resume`, refuse a fence older than the one that holds",
)
NEWER = Rule(
    "H1",
    "a newer attempt did not take over from one that was never released",
    "in `prepare` and `fence`, let a newer attempt.fence end the older hold first, from any state",
)
LEASE = Rule(
    "H3",
    "the engine died, and what it held is held for ever",
    "end the hold by yourself when attempt.lease_s seconds have passed since `prepare`, `fence` or "
    "the last `renew`",
)
RENEWED = Rule(
    "H3",
    "the hold ended although the engine renewed it in time",
    "let `renew` begin the attempt.lease_s seconds anew",
)
LAPSED = Rule(
    "H3",
    "the hold had ended by itself, and the snapshot was published all the same",
    "once a lease is over, refuse `commit`, `cut` and `renew` of its fence "
    '(Refused("lease_expired"))',
)
LAPSED_RESTORE = Rule(
    "R1",
    "the lease ended during a restore, and what was staged was activated all the same",
    "when the lease is over drop what is staged, and refuse `renew` of that fence",
)

# -- restoring ---------------------------------------------------------------------------------

RESTORES = Rule(
    "R1",
    "a good snapshot was not restored",
    "look at the step and the reason: `restore` must take what `commit` or `cut` wrote",
)
ROUND_TRIP = Rule(
    "R1",
    "what was restored is not what was saved",
    "write everything that `observe` shows, and let `resume` put the staged state in the place of "
    "what is there",
)
STAGED = Rule(
    "R1",
    "`restore` changed the live state before anybody activated it",
    "in `restore` only read, check and stage; let `resume` (given a Restore) activate",
)
ROLLED_BACK = Rule(
    "R1",
    "a restore that failed was not rolled back: something of it stayed",
    "let `rollback` drop what is staged, lift what `fence` holds, and leave the live state as it "
    "was; it must also work when `restore` never ran or failed half way",
)
LIVED_ON = Rule(
    "R4",
    "a restore into a participant that lived on did not replace its state",
    "let activation replace everything, also what came after the snapshot",
)
REPEATED_ACTIVATION = Rule(
    "S6",
    "`resume` of a restore, called again, brought the old state back or raised",
    "let the first `resume` take what is staged and forget it; a repeat then only opens",
)
FROM_NOTHING = Rule(
    "R2",
    "a start from nothing failed, or left it held",
    "`fence` and `resume` run, `restore` does not: nothing may be staged then",
)
AGAIN = Rule(
    "R3",
    "a second save, or a second restore, gave another state than the first",
    "keep nothing of an earlier attempt or restore: fresh file names, staged state, counters",
)
TAKEN_OVER = Rule(
    "R8",
    "a restore that another process took over was not finished there",
    "in the instance of the second process, `take_over` sets what `renew` and `resume` look for in "
    "memory: it renews and activates, under restore.fence, what the first one staged",
)
TAKEN_BACK = Rule(
    "R8",
    "a restore that another process took over was not rolled back there",
    "let `take_over` set what `rollback` looks for in memory: the instance of the second process "
    "drops what the first one staged, and lifts what it fenced",
)

# -- folder ------------------------------------------------------------------------------------

INSIDE = Rule(
    "F2.2",
    "nothing was written into its own part of the snapshot",
    "write what `restore` needs with `attempt.part()`; the snapshot must be enough by itself",
)
FSYNC = Rule(
    "F1.1",
    "answered before everything was on the disk",
    "leave `async with attempt.part()` before returning; what somebody else wrote goes through "
    "`part.adopt()`, or is fsynced by its writer, file first, then its directory",
)
DIGESTS = Rule(
    "F2.2",
    "the manifest does not describe the files",
    "let the writer hash what it writes, and write no more afterwards; `attempt.part()` does both",
)
UNTOUCHED = Rule(
    "R5",
    "the restore changed the snapshot",
    "only read below `restore.saved().path`: copy a file before opening it for writing (a database "
    "writes on opening)",
)
INSPECTED = Rule(
    "R2",
    "`inspect` does not understand what was saved",
    "as a classmethod, return a mapping that JSON can hold (but for keys that begin with '_') from "
    "the part alone; raise SnapshotRejected for one that may not be used",
)
