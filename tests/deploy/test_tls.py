"""TLS as both sides see it, over real sockets."""

import asyncio
import ssl
from pathlib import Path

import pytest
from certificates import Signed, make_certificate

from deploy.tls import (
    TlsError,
    client_context,
    own_certificate,
    pinned_context,
    pinned_text_context,
    server_context,
)


@pytest.fixture
def own(tmp_path: Path) -> Signed:
    return make_certificate(tmp_path, "own")


async def version(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """What the two agree upon. Raises ``ssl.SSLError``, or ``ConnectionError``."""

    async def serve(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server)
    async with listener, asyncio.timeout(10):
        port = listener.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        try:
            return writer.get_extra_info("ssl_object").version()
        finally:
            writer.close()


async def test_whoever_trusts_the_certificate_is_served(own: Signed) -> None:
    server = server_context(own.certificate, own.key)

    assert await version(server, client_context(own.certificate)) == "TLSv1.3"
    assert await version(server, pinned_context(own.certificate)) == "TLSv1.3"


async def test_a_certificate_can_be_trusted_by_its_text_without_what_else_is_in_the_file(
    own: Signed, tmp_path: Path
) -> None:
    both = tmp_path / "both.pem"
    both.write_text(own.key.read_text() + own.certificate.read_text())
    text = own_certificate(both)

    assert "PRIVATE" not in text
    server = server_context(own.certificate, own.key)
    assert await version(server, pinned_text_context(text, "told")) == "TLSv1.3"


def test_a_text_that_is_no_certificate_is_refused() -> None:
    with pytest.raises(TlsError, match="the one that was told: "):
        pinned_text_context(
            "-----BEGIN CERTIFICATE-----\nAA\n-----END CERTIFICATE-----", "the one that was told"
        )


async def test_whoever_does_not_trust_it_is_not(own: Signed, tmp_path: Path) -> None:
    server = server_context(own.certificate, own.key)
    other = make_certificate(tmp_path, "other")

    for client in (
        client_context(),
        client_context(other.certificate),
        pinned_context(other.certificate),
    ):
        with pytest.raises(ssl.SSLCertVerificationError):
            await version(server, client)


async def test_an_authority_is_trusted_for_what_it_has_signed(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority", addresses=())
    signed = make_certificate(tmp_path, "signed", signer=authority)
    server = server_context(signed.certificate, signed.key)

    assert await version(server, client_context(authority.certificate)) == "TLSv1.3"


async def test_a_pin_is_one_certificate_and_not_its_authority(tmp_path: Path) -> None:
    authority = make_certificate(tmp_path, "authority", addresses=())
    signed = make_certificate(tmp_path, "signed", signer=authority)
    sibling = make_certificate(tmp_path, "sibling", signer=authority)
    pinned = pinned_context(signed.certificate)  # the authority's is in the same file

    assert await version(server_context(signed.certificate, signed.key), pinned) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        await version(server_context(sibling.certificate, sibling.key), pinned)


async def test_a_name_is_looked_at_unless_the_certificate_is_pinned(tmp_path: Path) -> None:
    elsewhere = make_certificate(tmp_path, "elsewhere", addresses=("192.0.2.1",))
    server = server_context(elsewhere.certificate, elsewhere.key)

    assert await version(server, pinned_context(elsewhere.certificate)) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError, match="IP address mismatch"):
        await version(server, client_context(elsewhere.certificate))


async def test_nothing_older_than_version_1_2_is_spoken(own: Signed) -> None:
    server = server_context(own.certificate, own.key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(own.certificate)
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert await version(server, client) == "TLSv1.2"

    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await version(server, client)


@pytest.mark.parametrize("days", [(-2, -1), (1, 2)])
def test_a_certificate_that_does_not_hold_now_is_refused(
    tmp_path: Path, days: tuple[int, int]
) -> None:
    made = make_certificate(tmp_path, "made", days=days)

    with pytest.raises(TlsError, match=r"made\.pem: certificate .* (expired|not yet valid)"):
        server_context(made.certificate, made.key)


def test_so_is_one_with_the_key_of_another(own: Signed, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other")

    with pytest.raises(TlsError, match=r"own\.pem and .*other\.key: key values mismatch"):
        server_context(own.certificate, other.key)


def test_so_is_a_key_with_a_password_and_nobody_is_asked(tmp_path: Path) -> None:
    locked = make_certificate(tmp_path, "locked", password=b"secret")

    with pytest.raises(TlsError, match="the key wants a password"):
        server_context(locked.certificate, locked.key)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(None, "No such file"), (b"", "pem"), (b"a text", "pem"), (b"\xff\xfe", "PEM")],
)
def test_files_that_cannot_be_used_are_named(
    own: Signed, tmp_path: Path, data: bytes | None, reason: str
) -> None:
    bad = tmp_path / "bad"
    if data is not None:
        bad.write_bytes(data)

    for use in (
        lambda: server_context(bad, own.key),
        lambda: server_context(own.certificate, bad),
        lambda: client_context(bad),
        lambda: pinned_context(bad),
    ):
        with pytest.raises(TlsError, match=r"bad\b") as caught:
            use()
        assert reason.lower() in str(caught.value).lower() or "no certificate" in str(caught.value)
