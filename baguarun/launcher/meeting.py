"""Where the nodes of a job meet: a private etcd, somebody else's, or one that a node serves to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from baguarun.elastic.membership.embedded import PING_INTERVAL_S, PrivateEtcd
from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.errors import StoreLostError, UsageError
from baguarun.launcher.addresses import is_local_host, port_is_free, serving_address
from baguarun.launcher.rendezvous import Embedded, EndpointStore, ExternalStore
from baguarun.launcher.settings import RunSettings

if TYPE_CHECKING:
    from baguarun.elastic.membership.etcd import EtcdStore

_OPEN_TIMEOUT_S = 10.0
"""An etcd that somebody runs is there or it is not."""
_RETRY_S = 0.5


class Meeting:
    """The store of one job as this agent sees it; runs the private etcd where that is this node's task.

    `start` returns at once, so that etcd and the imports of its client load side by side.
    """

    def __init__(
        self,
        rendezvous: Embedded | ExternalStore | EndpointStore,
        settings: RunSettings,
        say: Callable[[str], None],
    ) -> None:
        self._rendezvous = rendezvous
        self._settings = settings
        self._say = say
        self._etcd: PrivateEtcd | None = None
        self._store: EtcdStore | None = None
        self._endpoint: HostPort | None = None
        """Where this machine serves the endpoint; its name may mean another address here than elsewhere."""

    @property
    def serves_others(self) -> bool:
        """Whether other nodes' membership ends when this agent stops."""
        return self._etcd is not None and isinstance(self._rendezvous, EndpointStore)

    @property
    def etcd_pid(self) -> int | None:
        return self._etcd.pid if self._etcd is not None else None

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

    async def open(self) -> EtcdStore:
        """Connect; an endpoint that another node is still about to serve is waited for."""
        from baguarun.elastic.membership.etcd import EtcdStore

        if self._etcd is not None and await self._etcd_is_ours(self._etcd):
            for warning in self._etcd.warnings:
                self._say(f"baguarun: warning: {warning}")
            self._store = await EtcdStore.open(
                self._etcd.url, timeout_s=_OPEN_TIMEOUT_S, ping_interval_s=PING_INTERVAL_S
            )
        elif isinstance(self._rendezvous, EndpointStore):
            endpoint = self._endpoint or HostPort(self._rendezvous.host, self._rendezvous.port)
            self._store = await self._open_when_served(StoreUrl(endpoints=(endpoint,)))
        elif isinstance(self._rendezvous, ExternalStore):
            url = StoreUrl.parse(self._rendezvous.url, password=self._settings.store_password)
            self._store = await EtcdStore.open(url, timeout_s=_OPEN_TIMEOUT_S)
        if self._store is None:
            raise RuntimeError("Meeting.start was not called")
        return self._store

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
        told = False
        while True:
            try:
                return await EtcdStore.open(url, timeout_s=_OPEN_TIMEOUT_S, ping_interval_s=PING_INTERVAL_S)
            except StoreLostError:
                if time.monotonic() > deadline_s:
                    raise
            if not told:
                self._say(f"baguarun: waiting for the node that serves {url.endpoints[0]}")
                told = True
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()
        if self._etcd is not None:
            await self._etcd.stop()
