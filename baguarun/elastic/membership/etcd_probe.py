"""Who listens on a port that will not serve us? Asked only after a connection failed, for the message."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass

from baguarun.elastic.membership.store_url import HostPort, StoreUrl
from baguarun.elastic.membership.waiting import within

# An HTTP/2 client's opening, preface and empty SETTINGS; any HTTP/2 server answers with SETTINGS of its own.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_SETTINGS = 4
_TLS_ALERT = b"\x15\x03"


@dataclass(frozen=True)
class Finding:
    """What was found at one endpoint."""

    refused: bool
    """Waiting will not mend it: the URL, a certificate or the port is wrong."""
    message: str
    """`found ...; do ...`"""


async def probe(url: StoreUrl, endpoint: HostPort, timeout_s: float) -> Finding:
    """Connect to one endpoint by hand and say what is there; never raises for what it finds, never hangs."""
    try:
        return await within(timeout_s, _probe(url, endpoint))
    except asyncio.TimeoutError:
        return Finding(
            False,
            f"found that {endpoint} takes connections but says nothing; is it frozen or overloaded?",
        )
    except ssl.SSLCertVerificationError as error:
        return Finding(
            True,
            f"found a certificate of {endpoint} that does not pass ({error.verify_message}); "
            f"give its authority by cacert= and a host name that the certificate carries",
        )
    except ssl.SSLError as error:
        return _tls_trouble(endpoint, error)
    except ConnectionRefusedError:
        return Finding(
            False, f"found nobody listening on {endpoint}; start etcd there, or correct host and port"
        )
    except OSError as error:
        return Finding(
            False,
            f"found no way to {endpoint} ({error.strerror or error}); check name, route and firewall",
        )


async def _probe(url: StoreUrl, endpoint: HostPort) -> Finding:
    try:
        answer = await _greet(endpoint, _tls_context(url) if url.tls else None)
    except ConnectionResetError:  # in the midst of the TLS handshake
        answer = b""
    if url.tls and not answer and await _greet(endpoint, None):
        return _without_tls(endpoint)
    if len(answer) > 3 and answer[3] == _SETTINGS:
        return Finding(
            False, f"found an HTTP/2 server on {endpoint} that did not answer in time; is it overloaded?"
        )
    wants_tls = not url.tls and (not answer or answer.startswith((_TLS_ALERT, b"HTTP/1.0 400")))
    if wants_tls and await _speaks_tls(endpoint):
        return Finding(
            True, f"found a server that wants TLS on {endpoint}; write etcds://... in place of etcd://..."
        )
    if not answer:
        return Finding(False, f"found that {endpoint} closes the connection at once; is it shutting down?")
    first = answer.splitlines()[0][:60].decode("ascii", "replace")
    return Finding(
        True,
        f"found a server that is not etcd on {endpoint} (it says {first!r}); correct host and port",
    )


def _tls_trouble(endpoint: HostPort, error: ssl.SSLError) -> Finding:
    reason = (error.reason or str(error)).upper()
    if "WRONG_VERSION" in reason or "UNKNOWN_PROTOCOL" in reason or "RECORD_LAYER" in reason:
        return _without_tls(endpoint)
    if "CERTIFICATE" in reason or "UNKNOWN_CA" in reason:
        return Finding(
            True,
            f"found that {endpoint} does not accept our client certificate "
            f"({reason.lower().replace('_', ' ')}); give one that its authority signed by cert= and key=",
        )
    return Finding(
        True, f"found that TLS with {endpoint} fails ({error.reason or error}); check cacert=, cert= and key="
    )


def _without_tls(endpoint: HostPort) -> Finding:
    return Finding(
        True, f"found a server without TLS on {endpoint}; write etcd://... in place of etcds://..."
    )


async def _greet(endpoint: HostPort, context: ssl.SSLContext | None) -> bytes:
    """What the server says to an HTTP/2 client's opening; empty if it hangs up."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    try:
        writer.write(_HELLO)
        return await reader.read(256)
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


async def _speaks_tls(endpoint: HostPort) -> bool:
    """Whether a TLS handshake gets anywhere; nothing is verified, as nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "").upper()
    except OSError:
        return False
    writer.transport.abort()
    return True


def _tls_context(url: StoreUrl) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=url.cacert)
    context.set_alpn_protocols(["h2"])
    if url.cert is not None:
        context.load_cert_chain(url.cert, url.key)
    return context
