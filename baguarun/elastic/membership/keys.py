"""Where everything of a job lies in the store.

    /baguarun/<job>/
      spec               the job's digest and summary; written by the leader
      desired            how many nodes the job shall have, if fewer than it may; written by `scale`
      events             the last things that happened, with their times; written by the leader
      nodes/<id>         a registered node (leased; watched by the leader)
      all/               watched by every agent, so keep it small:
        leader           token of the leading agent (leased, created in the join transaction)
        world/<g>        totals of World g; only the newest is kept
        live/<g>         all members of g have acknowledged; carries the master port
        halt/<g>         in place: all workers of g are to stop at one commit, and no World follows for now
        check/<g>        the leader asks all members of g for a sign of life
        note             why nothing happens, for people
        outcome          how the job ended
      row/<id>/0, 1      one node's place in the newest even and odd World   } watched
      row/<id>/word      what the leader has to say to a node without a place } by that node
      members/<g>        who is in World g, in rank order; read by the next leader only
      ack/<g>/<id>       this node's older workers are gone (leased; counted, not watched)
      check/<g>/<id>     the answer to all/check/<g> (leased; counted, not watched)
      errors/<id>, done/<id>, leave/<id>      reports (watched by the leader)
      suspect/<g>/<id>            whom that node's workers blame for broken communication } watched by
      suspect/<g>/<id>/<other>    that node no longer hears its neighbour's agent (leased) } the leader
      row/<id>/ask, alive/<id>    is the suspect alive? It writes the same text back (watched by the leader)
      pace/<id>          how the steps of that node's workers go (leased; rewritten at most every 10 s;
                         read by the agent of node 0 and for people)
      stop               ends the job; written by `stop` (watched by the leader, as `desired` is)

and, for `baguarun jobs`, /baguarun/.jobs/<job>: every job that ever had a leader here (no job id of the
command line begins with a dot).

All that the leader writes is fenced by a compare on `all/leader`.
"""

from __future__ import annotations

JOBS = "/baguarun/.jobs/"
"""The list of jobs: keys without a value."""


class JobKeys:
    """Key names of one job."""

    def __init__(self, job_id: str) -> None:
        self.root = f"/baguarun/{job_id}/"
        self.listed = JOBS + job_id
        self.spec = self.root + "spec"
        self.desired = self.root + "desired"
        self.events = self.root + "events"
        self.nodes = self.root + "nodes/"
        self.all = self.root + "all/"
        self.leader = self.all + "leader"
        self.worlds = self.all + "world/"
        self.lives = self.all + "live/"
        self.halts = self.all + "halt/"
        self.asks = self.all + "check/"
        self.note = self.all + "note"
        self.outcome = self.all + "outcome"
        self.rows = self.root + "row/"
        self.members = self.root + "members/"
        self.acks = self.root + "ack/"
        self.checks = self.root + "check/"
        self.errors = self.root + "errors/"
        self.dones = self.root + "done/"
        self.leaves = self.root + "leave/"
        self.suspects = self.root + "suspect/"
        self.alive = self.root + "alive/"
        self.paces = self.root + "pace/"
        self.stop = self.root + "stop"

    def row(self, node_id: str, generation: int) -> str:
        """One node's place. Two in turn: a World that is prepared does not overwrite the one that is."""
        return f"{self.rows}{node_id}/{generation % 2}"

    def word(self, node_id: str) -> str:
        return f"{self.rows}{node_id}/word"

    def ack(self, generation: int, node_id: str = "") -> str:
        """One node's acknowledgement; without a node, the prefix that is counted."""
        return f"{self.acks}{generation}/{node_id}"

    def check(self, generation: int, node_id: str = "") -> str:
        """One node's sign of life; without a node, the prefix that is counted."""
        return f"{self.checks}{generation}/{node_id}"

    def ask(self, node_id: str) -> str:
        """The leader's question whether that node is alive."""
        return f"{self.rows}{node_id}/ask"

    def suspect(self, generation: int, node_id: str = "", silent: str = "") -> str:
        """One node's complaint, about `silent` if its probes made it; without a node, the prefix of all."""
        return f"{self.suspects}{generation}/{node_id}{'/' if silent else ''}{silent}"
