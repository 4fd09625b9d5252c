"""Where the nodes of a job meet: a private etcd, somebody else's, or one that a node serves to the others."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from baguarun.elastic.membership.embedded import PING_INTERVAL_S, PrivateEtcd
from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import SetupError, StoreLostError, UsageError
from baguarun.launcher.addresses import is_local_host, port_is_free, serving_address
from baguarun.launcher.rendezvous import Embedded, EndpointStore, ExternalStore
from baguarun.launcher.settings import RunSettings

if TYPE_CHECKING:
    from baguarun.elastic.membership.etcd import EtcdStore

_OPEN_TIMEOUT_S = 10.0
"""An etcd that somebody runs is there or it is not."""
_RETRY_S = 0.5
_QUIET_S = 2.0
"""A wait that takes longer is explained."""
_GUARD_S = 0.25
_GUARD_PAUSE_S = 10.0
"""At most, between two attempts to start a private etcd that will not start again."""


class Meeting:
    """The store of one job as this agent sees it; runs the private etcd where that is this node's task.

    `start` returns at once, so that etcd and the imports of its client load side by side.
    """

    def __init__(
        self,
        rendezvous: Embedded | ExternalStore | EndpointStore,
        settings: RunSettings,
        say: Callable[[str], None],
        spare: Callable[[int], None],
    ) -> None:
        """`spare` hears of every process started here that must outlive the keeper."""
        self._rendezvous = rendezvous
        self._settings = settings
        self._say = say
        self._spare = spare
        self._etcd: PrivateEtcd | None = None
        self._store: EtcdStore | None = None
        self._url: StoreUrl | None = None
        self._endpoint: HostPort | None = None
        """Where this machine serves the endpoint; its name may mean another address here than elsewhere."""

    @property
    def serves_others(self) -> bool:
        """Whether other nodes' membership ends when this agent stops."""
        return self._etcd is not None and isinstance(self._rendezvous, EndpointStore)

    @property
    def place(self) -> str:
        """The store's URL, as it may be shown."""
        return str(self._url or "")

    def start(self) -> None:
        """Start the private etcd if it is ours to run. Raises `SetupError` if there is no etcd to start."""
        place = self._rendezvous
        if isinstance(place, ExternalStore):
            return
        if isinstance(place, Embedded):
            listen = HostPort("127.0.0.1", 0)
        else:
            is_ours = is_local_host(place.host) if place.is_host is None else place.is_host
            if not is_ours:
                return
            self._endpoint = listen = HostPort(serving_address(place.host), place.port)
            # Two agents on one machine name the same endpoint: the second finds it served and joins.
            if not port_is_free(listen.host, listen.port):
                return
        self._etcd = PrivateEtcd(listen, binary=self._settings.etcd_binary)
        self._etcd.start()
        self._spare_etcd(self._etcd)

    async def open(self) -> EtcdStore:
        """Connect; an endpoint that another node is still about to serve is waited for."""
        telling = asyncio.get_running_loop().call_later(_QUIET_S, self._tell_what_we_wait_for)
        try:
            return await self._open()
        finally:
            telling.cancel()

    def _tell_what_we_wait_for(self) -> None:
        if self._etcd is not None:
            what = "the private etcd"
        elif isinstance(self._rendezvous, EndpointStore):
            what = f"the node that serves {HostPort(self._rendezvous.host, self._rendezvous.port)}"
        else:
            what = f"the store {self.place}"
        self._say(f"baguarun: waiting for {what}")

    async def _open(self) -> EtcdStore:
        # gRPC prints a line when a process forks that has used it; `keep_serving` forks, and execs at once.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
        from baguarun.elastic.membership.etcd import EtcdStore

        if self._etcd is not None and await self._etcd_is_ours(self._etcd):
            for warning in self._etcd.warnings:
                self._say(f"baguarun: warning: {warning}")
            self._url = self._etcd.url
            self._etcd.announce(self._settings.job_id)
            self._store = await EtcdStore.open(
                self._url, timeout_s=_OPEN_TIMEOUT_S, ping_interval_s=PING_INTERVAL_S
            )
        elif isinstance(self._rendezvous, EndpointStore):
            endpoint = self._endpoint or HostPort(self._rendezvous.host, self._rendezvous.port)
            self._url = StoreUrl(endpoints=(endpoint,))
            self._store = await self._open_when_served(self._url)
        elif isinstance(self._rendezvous, ExternalStore):
            self._url = StoreUrl.parse(self._rendezvous.url, password=self._settings.store_password)
            self._store = await EtcdStore.open(self._url, timeout_s=_OPEN_TIMEOUT_S)
        if self._store is None:
            raise RuntimeError("Meeting.start was not called")
        return self._store

    async def keep_serving(self) -> None:
        """Never returns: starts the private etcd again, with its data, whenever it ends by itself."""
        pause_s, told = _GUARD_S, ""
        while True:
            await asyncio.sleep(pause_s)
            etcd = self._etcd
            if etcd is None or etcd.returncode is None:
                pause_s = _GUARD_S
                continue
            if not told:
                self._say(f"baguarun: the private etcd {_how_it_ended(etcd.returncode)}; starting it again")
            try:
                etcd.restart()
                self._spare_etcd(etcd)
                await etcd.wait_ready()
                told = ""
            except (OSError, SetupError, UsageError) as error:
                pause_s = min(2 * pause_s, _GUARD_PAUSE_S)
                if str(error) != told:
                    told = str(error)
                    self._say(f"baguarun: {told}\nbaguarun: trying again until it serves")

    def _spare_etcd(self, etcd: PrivateEtcd) -> None:
        if etcd.pid is not None:
            self._spare(etcd.pid)

    async def _etcd_is_ours(self, etcd: PrivateEtcd) -> bool:
        """Wait until it serves. False if another agent of this machine was faster: its etcd has the port."""
        try:
            await etcd.wait_ready()
        except UsageError:
            if self._endpoint is None:
                raise
        if etcd.returncode is None:
            return True
        await etcd.stop()
        self._etcd = None
        return False

    async def _open_when_served(self, url: StoreUrl) -> EtcdStore:
        from baguarun.elastic.membership.etcd import EtcdStore

        deadline_s = time.monotonic() + self._settings.join_timeout_s
        while True:
            try:
                return await EtcdStore.open(url, timeout_s=_OPEN_TIMEOUT_S, ping_interval_s=PING_INTERVAL_S)
            except StoreLostError:
                if time.monotonic() > deadline_s:
                    raise
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
        if self._etcd is not None:
            await self._etcd.stop()


def _how_it_ended(returncode: int) -> str:
    return f"was killed by signal {-returncode}" if returncode < 0 else f"ended with status {returncode}"
