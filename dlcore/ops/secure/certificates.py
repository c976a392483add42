"""Certificates of the form that docs/tls.md asks for, and the authority that signs them."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_address
from secrets import token_urlsafe
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dlcore.base.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_EARLIER = timedelta(hours=1)
"""Certificates hold since then, for the clocks of hosts differ."""
_AUTHORITY_DAYS = 3650
_PASSWORD_BYTES = 32


def new_key() -> bytes:
    """Return a new private key: PKCS 8 in PEM, without a passphrase."""
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_user() -> bytes:
    """Return a user of ZooKeeper with a new password, as its clients read them."""
    return f"dlog:{token_urlsafe(_PASSWORD_BYTES)}\n".encode()


def public_key(pem: bytes) -> bytes:
    """Return the public key of a private one, in PEM.

    Raises:
        ConfigurationError: the key cannot be read.
    """
    return _opened(pem).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def _opened(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = load_pem_private_key(pem, password=None)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the private key cannot be read: {error}; expected PEM without a passphrase"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(
            f"the private key is a {type(key).__name__}, expected one of an elliptic curve"
        )
    return key


def authority_certificate(name: str, key: bytes, *, now: datetime) -> bytes:
    """Return the certificate of an authority, which others trust, in PEM.

    Raises:
        ConfigurationError: the key cannot be read.
    """
    own, ends = _opened(key), now + timedelta(days=_AUTHORITY_DAYS)
    builder = begun(named(name), own.public_key(), since=now - _EARLIER, ends=ends)
    builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
    builder = builder.add_extension(key_usage("key_cert_sign", "crl_sign"), critical=True)
    return _signed(builder, named(name), own)


class Authority:
    """Signs certificates; trust in it is trust in all of them.

    Raises:
        ConfigurationError: key or certificate cannot be read, or do not belong together.
    """

    def __init__(self, key: bytes, certificate: bytes) -> None:
        self._key = _opened(key)
        try:
            own = x509.load_pem_x509_certificate(certificate)
        except ValueError as error:
            raise ConfigurationError(
                f"the authority's certificate cannot be read: {error}"
            ) from error
        if own.public_key() != self._key.public_key():
            raise ConfigurationError("the authority's key is not that of its certificate")
        self._name = own.subject

    def issue(
        self,
        name: str,
        key: bytes,
        *,
        places: Sequence[str],
        purposes: Sequence[x509.ObjectIdentifier],
        now: datetime,
        days: int,
    ) -> bytes:
        """Return the certificate of a private key in PEM, for a holder called `name` at `places`.

        Raises:
            ConfigurationError: the key cannot be read.
        """
        public, ends = _opened(key).public_key(), now + timedelta(days=days)
        builder = begun(named(name), public, since=now - _EARLIER, ends=ends)
        builder = builder.add_extension(x509.BasicConstraints(False, None), critical=True)
        builder = builder.add_extension(key_usage("digital_signature"), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        named_places = x509.SubjectAlternativeName([place_of(each) for each in places])
        return _signed(builder.add_extension(named_places, critical=False), self._name, self._key)


def _signed(
    builder: x509.CertificateBuilder, name: x509.Name, key: ec.EllipticCurvePrivateKey
) -> bytes:
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    builder = builder.add_extension(signer, critical=False).issuer_name(name)
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


def begun(
    name: x509.Name, key: ec.EllipticCurvePublicKey, *, since: datetime, ends: datetime
) -> x509.CertificateBuilder:
    """Return what every certificate has."""
    identifier = x509.SubjectKeyIdentifier.from_public_key(key)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(since)
        .not_valid_after(ends)
        .add_extension(identifier, critical=False)
    )


def named(name: str) -> x509.Name:
    """Return a subject that has only a common name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def place_of(host: str) -> x509.GeneralName:
    """Return a host as certificates have it: an address, or a name."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def key_usage(*given: str) -> x509.KeyUsage:
    """Return the uses of a key, of which some are `given`."""
    return x509.KeyUsage(
        digital_signature="digital_signature" in given,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign="key_cert_sign" in given,
        crl_sign="crl_sign" in given,
        encipher_only=False,
        decipher_only=False,
    )
