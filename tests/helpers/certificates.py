"""Certificates of an authority of the test's own."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Signed:
    """A certificate and its key, as files and as what signs others."""

    certificate: Path
    key: Path
    subject: x509.Name
    signs: ec.EllipticCurvePrivateKey


def make_certificate(
    folder: Path,
    name: str,
    *,
    signer: Signed | None = None,
    addresses: tuple[str, ...] = ("127.0.0.1",),
    days: tuple[int, int] = (-1, 1),
    password: bytes | None = None,
) -> Signed:
    """``NAME.pem`` and ``NAME.key``. ``signer``: None: itself. ``days``: from when until when it
    holds, counted from now.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    is_authority = not addresses
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if signer is None else signer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + days[0] * DAY)
        .not_valid_after(now + days[1] * DAY)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if addresses:
        names = [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        certificate = certificate.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signs = key if signer is None else signer.signs
    pem = certificate.sign(signs, hashes.SHA256()).public_bytes(Encoding.PEM)
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(pem + (b"" if signer is None else signer.certificate.read_bytes()))
    secret = NoEncryption() if password is None else BestAvailableEncryption(password)
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    return Signed(*files, subject, key)
