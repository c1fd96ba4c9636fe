//! The certificates of one cluster: a certificate authority, and a certificate for each server and client.
//!
//! The authority's key stays in memory. The cluster directory has only the keys of servers and clients. A
//! directory that is copied, or uploaded with a report, therefore cannot issue new certificates.

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, ExtendedKeyUsagePurpose,
    IsCa, KeyPair, KeyUsagePurpose,
};

/// The certificate authority of one cluster. Servers and clients trust it and no other.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its private key, both PEM.
#[derive(Clone)]
pub struct Identity {
    pub certificate: String,
    pub key: String,
}

/// The holder of a client certificate. Kubernetes reads the user from the common name and the group from the
/// organisation.
#[derive(Clone, Copy)]
pub struct Subject<'a> {
    pub user: &'a str,
    /// The group, such as `system:masters`.
    pub group: Option<&'a str>,
}

impl Authority {
    /// Creates an authority with a new key.
    pub(crate) fn generate(name: &str) -> Result<Authority> {
        let mut params = CertificateParams::default();
        params.distinguished_name = common_name(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let issuer = KeyPair::generate()
            .and_then(|key| CertifiedIssuer::self_signed(params, key))
            .with_context(|| format!("generate the certificate authority {name:?}"))?;
        Ok(Authority { issuer })
    }

    /// Returns the authority's own certificate, which servers and clients trust.
    pub(crate) fn certificate(&self) -> String {
        self.issuer.pem()
    }

    /// Creates a certificate with which a client authenticates to a server.
    pub fn client(&self, subject: Subject<'_>) -> Result<Identity> {
        let mut params = leaf(subject.user, Vec::new(), ExtendedKeyUsagePurpose::ClientAuth)?;
        if let Some(group) = subject.group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        self.sign(params).with_context(|| format!("issue a client certificate for {:?}", subject.user))
    }

    /// Creates a certificate for a server that clients reach by any of these names and addresses.
    pub(crate) fn server(&self, common: &str, names: Vec<String>) -> Result<Identity> {
        leaf(common, names, ExtendedKeyUsagePurpose::ServerAuth)
            .and_then(|params| self.sign(params))
            .with_context(|| format!("issue a server certificate for {common:?}"))
    }

    fn sign(&self, params: CertificateParams) -> Result<Identity> {
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Identity { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// Creates the key pair that signs service account tokens, as PEM: (private, public). It has no certificate.
pub(crate) fn signing_key_pair() -> Result<(String, String)> {
    let key = KeyPair::generate().context("generate the service account key pair")?;
    Ok((key.serialize_pem(), key.public_key_pem()))
}

fn leaf(name: &str, alternatives: Vec<String>, usage: ExtendedKeyUsagePurpose) -> Result<CertificateParams> {
    let mut params = CertificateParams::new(alternatives)?;
    params.distinguished_name = common_name(name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn common_name(name: &str) -> DistinguishedName {
    let mut subject = DistinguishedName::new();
    subject.push(DnType::CommonName, name);
    subject
}
