"""TLS: for both listeners, and for those who dial them. Nothing older than version 1.2."""

import re
import ssl
from collections.abc import Callable
from pathlib import Path

from common.errors import HeadraceError

OLDEST = ssl.TLSVersion.TLSv1_2

MOST_ROUNDS = 10
"""Of a handshake; three are enough."""

CERTIFICATE = re.compile(
    "-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.ASCII | re.DOTALL
)


class TlsError(HeadraceError):
    """A certificate or key that cannot be used; the text says which, and why."""


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """``certificate``: with those that lead from it to its authority, if there are any.

    Raises ``TlsError``, also if the two do not belong together or have expired.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = OLDEST
    for file in (certificate, key):
        _readable(file)
    is_encrypted = False

    def password() -> str:
        nonlocal is_encrypted
        is_encrypted = True  # else OpenSSL would ask at the terminal
        return ""

    try:
        context.load_cert_chain(certificate, key, password)
    except (ssl.SSLError, ValueError) as error:
        reason = "the key wants a password" if is_encrypted else _reason(error)
        raise TlsError(f"{certificate} and {key}: {reason}") from error
    try:
        _shake_hands(context, pinned_context(certificate))
    except ssl.SSLError as error:
        raise TlsError(f"{certificate}: {_reason(error)}") from error
    return context


def client_context(authorities: Path | None = None) -> ssl.SSLContext:
    """Of one who dials. ``authorities``: whose certificates to trust; None: those that the system
    trusts. Raises ``TlsError``.
    """
    if authorities is None:
        context = ssl.create_default_context()
        context.minimum_version = OLDEST
        return context
    _readable(authorities)
    context = _trusting(
        lambda context: context.load_verify_locations(authorities), str(authorities)
    )
    context.check_hostname = True
    return context


def pinned_context(certificate: Path) -> ssl.SSLContext:
    """Of one who dials and trusts this certificate alone, the first in the file, under whatever name
    its owner is reached: nobody else has its key. Raises ``TlsError``.
    """
    return pinned_text_context(own_certificate(certificate), str(certificate))


def own_certificate(file: Path) -> str:
    """Its first, in PEM form, and nothing else, which may be secret. Raises ``TlsError``."""
    first = CERTIFICATE.search(_readable(file))
    if first is None:
        raise TlsError(f"{file}: there is no certificate in it")
    return first[0]


def pinned_text_context(certificate: str, source: str) -> ssl.SSLContext:
    """As ``pinned_context``, of a text in PEM form. ``source``: for the message of a ``TlsError``."""
    return _trusting(lambda context: context.load_verify_locations(cadata=certificate), source)


def _trusting(load: Callable[[ssl.SSLContext], None], source: str) -> ssl.SSLContext:
    """It does not look at names yet."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = OLDEST
    context.check_hostname = False
    # What is named is trusted itself, whether it is an authority or somebody's own certificate.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        load(context)
    except ssl.SSLError as error:
        raise TlsError(f"{source}: {_reason(error)}") from error
    return context


def _shake_hands(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> None:
    """In memory: what a client will find out, dates among it. Raises ``ssl.SSLError``."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    client = client_side.wrap_bio(to_client, to_server)
    for _ in range(MOST_ROUNDS):
        waiting = 0
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                waiting += 1
        if waiting == 0:
            return
    raise AssertionError("each round brings the next message")


def _readable(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise TlsError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TlsError(f"{file}: it is not in PEM form") from error


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return "it is not in PEM form"
