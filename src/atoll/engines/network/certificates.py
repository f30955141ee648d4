"""Keys, requests and certificates of a federation's parties, with the package cryptography.

A certificate states its purpose: the coordinator's is for servers, that of a site or of the command
session for clients. Neither is accepted for the other.
"""

import hashlib
import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.core.errors import UserError

__all__ = [
    "Signer",
    "common_name",
    "fingerprint",
    "for_host",
    "key_pem",
    "new_key",
    "purposes_of",
    "read_certificate",
    "read_key",
    "read_request",
    "request_pem",
]  # fmt: skip

CLIENT, SERVER = "client", "server"  # purposes of a certificate
PURPOSES = {CLIENT: ExtendedKeyUsageOID.CLIENT_AUTH, SERVER: ExtendedKeyUsageOID.SERVER_AUTH}
DAYS = 360  # days of validity of a party's certificate
SLACK = timedelta(minutes=5)  # maximum difference between the clocks of parties
BITS = 2048  # minimum key size in bits


def new_key() -> Any:
    """A new private key; NVFlare signs with RSA."""
    return rsa.generate_private_key(public_exponent=65537, key_size=BITS)


def key_pem(key: Any, passphrase: str = "") -> bytes:
    """A private key in PEM, encrypted if there is a passphrase."""
    if not passphrase:
        encryption: Any = serialization.NoEncryption()
    else:
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
    )
    return pem


def read_key(content: bytes, where: str, passphrase: str = "") -> Any:
    """Read a private key; raise an error that says what is wrong with it or its passphrase."""
    remedy = "give --passphrase, or set ATOLL_PASSPHRASE"
    locked = b"ENCRYPTED" in content
    if locked and not passphrase:
        raise UserError("the private key is under a passphrase", where, remedy)
    try:
        return serialization.load_pem_private_key(content, passphrase.encode() if locked else None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if locked:
            raise UserError(
                "the passphrase does not open the private key", where, remedy
            ) from error
        raise UserError("not a private key", where, "ask for a new kit") from error


def fingerprint(public_key: Any) -> str:
    """SHA-256 of a public key in groups of four, to read out on the telephone."""
    content = public_key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digest = hashlib.sha256(content).hexdigest()
    return " ".join(digest[at : at + 4] for at in range(0, len(digest), 4))


def _name(common: str, organisation: str = "", role: str = "") -> x509.Name:
    """A subject as NVFlare reads it: it looks for a command session's role in its name."""
    pairs = [(NameOID.COMMON_NAME, common), (NameOID.ORGANIZATION_NAME, organisation),
             (NameOID.UNSTRUCTURED_NAME, role)]  # fmt: skip
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in pairs if value])


def common_name(signed: Any) -> str:
    """The name in a certificate or a request; empty if there is none."""
    attributes = signed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(attributes[0].value) if attributes else ""


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def purposes_of(certificate: Any) -> set[str]:
    """The extended key usages of a certificate; empty for older certificates without any."""
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return set()
    return {name for name, kind in PURPOSES.items() if kind in usages}


def for_host(certificate: Any, host: str) -> bool:
    """Whether a certificate names a host."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return _host(host) in list(names)


def read_certificate(content: bytes, where: str) -> Any:
    """Read a certificate."""
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise UserError("not a certificate", where, "ask for a new kit") from error


def request_pem(name: str, key: Any) -> bytes:
    """A certificate request for a name, signed by its key; it does not contain the private key."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_name(name, "atoll"))
    pem: bytes = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return pem


def read_request(content: bytes, where: str) -> Any:
    """Read a request; refuse one with a wrong signature or with a key that NVFlare cannot use."""
    remedy = "ask the site for the file that atoll network request made"
    try:
        request = x509.load_pem_x509_csr(content)
        key = request.public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UserError("not a certificate request", where, remedy) from error
    if not request.is_signature_valid or not common_name(request):
        raise UserError("the request is not signed by its own key", where, remedy)
    if not isinstance(key, rsa.RSAPublicKey) or key.key_size < BITS:
        raise UserError(f"the key is not RSA with {BITS:,} bits or more", where, remedy)
    return request


@dataclass(frozen=True)
class Signer:
    """A project's authority: its certificate and its private key."""

    certificate: Any
    key: Any

    @staticmethod
    def new(project: str, days: int) -> "Signer":
        """A new self-signed authority."""
        key, now = new_key(), datetime.now(UTC)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        builder = (
            _begun(_name(project), _name(project), key.public_key(), key)
            .not_valid_before(now)
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
        )
        return Signer(builder.sign(key, hashes.SHA256()), key)

    @staticmethod
    def read(certificate: str, key: str) -> "Signer":
        """Read a stored authority."""
        private = serialization.load_pem_private_key(key.encode(), None)
        return Signer(x509.load_pem_x509_certificate(certificate.encode()), private)

    @property
    def pem(self) -> bytes:
        """The authority's certificate in PEM."""
        pem: bytes = self.certificate.public_bytes(serialization.Encoding.PEM)
        return pem

    def sign(self, name: str, public_key: Any, host: str = "", role: str = "") -> bytes:
        """Sign a party's certificate: for a server if `host` is given, else for a client."""
        now, end = datetime.now(UTC), self.certificate.not_valid_after_utc
        if end <= now:
            what, remedy = f"the authority ended on {end:%Y-%m-%d}", "make all kits anew"
            raise UserError(what, common_name(self.certificate), remedy)
        subject = _name(name, "atoll", role)
        purpose = PURPOSES[SERVER if host else CLIENT]
        builder = (
            _begun(subject, self.certificate.subject, public_key, self.key)
            .not_valid_before(max(now - SLACK, self.certificate.not_valid_before_utc))
            .not_valid_after(min(end, now + timedelta(days=DAYS)))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(key_encipherment=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=True)
        )
        if host:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host)]), critical=False
            )
        signed = builder.sign(self.key, hashes.SHA256())
        pem: bytes = signed.public_bytes(serialization.Encoding.PEM)
        return pem


def _begun(subject: x509.Name, issuer: x509.Name, public_key: Any, signing: Any) -> Any:
    own = x509.SubjectKeyIdentifier.from_public_key(public_key)
    of = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .add_extension(own, critical=False)
        .add_extension(of, critical=False)
    )


def _usage(**further: bool) -> x509.KeyUsage:
    none = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    return x509.KeyUsage(digital_signature=True, **{**none, **further})
