//! The service over TCP.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SanType,
};
use tokio_util::sync::CancellationToken;

use crate::support::*;

/// An authority and the files of one certificate that it has issued.
struct Pki {
    authority: String,
    certificate: String,
    key: String,
}

/// Creates an authority with a certificate, in files whose names begin with `name`.
fn pki(directory: &Path, name: &str, usage: ExtendedKeyUsagePurpose) -> Pki {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, format!("authority of {name}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.extended_key_usages = vec![usage];
    params.subject_alt_names.push(SanType::IpAddress([127, 0, 0, 1].into()));
    let key = KeyPair::generate().unwrap();
    let certificate = params.signed_by(&key, &issuer).unwrap();
    let file = |kind: &str, text: &str| write(&directory.join(format!("{name}.{kind}")), text);
    Pki {
        authority: file("ca", &issuer.pem()),
        certificate: file("crt", &certificate.pem()),
        key: file("key", &key.serialize_pem()),
    }
}

struct Fixture {
    scratch: tempfile::TempDir,
    server: Pki,
    client: Pki,
    node: Node,
}

fn options(server: &Pki, client_ca: &str) -> Vec<String> {
    vec![
        "--listen=127.0.0.1:0".to_owned(),
        format!("--tls-cert={}", server.certificate),
        format!("--tls-key={}", server.key),
        format!("--client-ca={client_ca}"),
    ]
}

fn fixture() -> Fixture {
    let scratch = tempfile::tempdir().unwrap();
    let server = pki(scratch.path(), "server", ExtendedKeyUsagePurpose::ServerAuth);
    let client = pki(scratch.path(), "client", ExtendedKeyUsagePurpose::ClientAuth);
    let node = Node::start(&options(&server, &client.authority));
    Fixture { scratch, server, client, node }
}

impl Fixture {
    fn dbg(&self, client: &Pki, server_ca: &str) -> Output {
        let address = format!("https://{}", self.node.tcp());
        let tls = ["--tls-cert", &client.certificate, "--tls-key", &client.key, "--server-ca", server_ca];
        run(&[&["--address", &address], &tls[..], &["condition", "list"]].concat())
    }
}

const REMEDY: &str = "--tls-cert must be from the authority that node-debug has as --client-ca";

#[test]
fn client_with_trusted_certificate_is_served() {
    let fixture = fixture();
    let output = fixture.dbg(&fixture.client, &fixture.server.authority);
    assert_eq!(output.code, Some(0), "{output:?}");
    assert!(output.stdout.contains("plugin-serving"));
}

#[test]
fn client_with_foreign_certificate_is_refused() {
    let fixture = fixture();
    let foreign = pki(fixture.scratch.path(), "foreign", ExtendedKeyUsagePurpose::ClientAuth);
    fixture.dbg(&foreign, &fixture.server.authority).assert_failed(REMEDY);
}

#[test]
fn service_with_foreign_certificate_is_refused() {
    let fixture = fixture();
    fixture.dbg(&fixture.client, &fixture.client.authority).assert_failed(REMEDY);
}

/// Nothing listens at the address, so the remedy is to start node-debug.
#[test]
fn refused_connection_is_no_certificate_error() {
    let fixture = fixture();
    // Bound, so that no other process takes the port, but not listening.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let address = format!("https://{}", socket.local_addr().unwrap());
    let Pki { certificate, key, .. } = &fixture.client;
    let tls = ["--tls-cert", certificate, "--tls-key", key, "--server-ca", &fixture.server.authority];
    run(&[&["--address", &address], &tls[..], &["logs"]].concat())
        .assert_failed("start node-debug on the node");
}

#[test]
fn client_without_certificate_is_refused() {
    use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
    let fixture = fixture();
    let address = format!("https://{}", fixture.node.tcp());
    let authority = std::fs::read(&fixture.server.authority).unwrap();
    let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority));
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let called = runtime.block_on(async {
        let channel = Endpoint::from_shared(address).unwrap().tls_config(tls).unwrap().connect().await?;
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await?;
        let path = "/loopfs.nodedebug.v1.NodeDebug/Describe".parse().unwrap();
        let codec = tonic_prost::ProstCodec::<(), ()>::default();
        client.unary(tonic::Request::new(()), path, codec).await.map_err(Box::new)?;
        Ok::<_, Box<dyn std::error::Error>>(())
    });
    assert!(called.is_err());
    run(&["--address", &format!("https://{}", fixture.node.tcp()), "logs"])
        .assert_failed("needs --tls-cert, --tls-key and --server-ca");
}

/// Each connection is of another client.
#[test]
fn unauthenticated_connections_do_not_end_sessions() {
    let fixture = fixture();
    fixture.node.write_log("before\n");
    let address = format!("https://{}", fixture.node.tcp());
    let Pki { certificate, key, .. } = &fixture.client;
    let options = ["--address", &address, "--tls-cert", certificate, "--tls-key", key];
    let mut command = dbg();
    command.args(options).args(["--server-ca", &fixture.server.authority, "logs", COMPONENT, "--follow"]);
    let mut session = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(session.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap(), "before");

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let connections: Vec<_> = (2..=65)
        .map(|last| {
            runtime.block_on(async {
                let socket = tokio::net::TcpSocket::new_v4().unwrap();
                socket.bind(([127, 0, 0, last], 0).into()).unwrap();
                socket.connect(fixture.node.tcp()).await.unwrap()
            })
        })
        .collect();
    // The listener closes one of two connections, so it has accepted all of them when the first half is closed.
    runtime.block_on(async {
        for connection in &connections[..32] {
            connection.readable().await.unwrap();
        }
    });
    fixture.node.append_log("after\n");
    assert_eq!(lines.next().unwrap(), "after");
    session.kill().unwrap();
    session.wait().unwrap();
}

/// It fails before it opens its unix socket.
#[test]
fn service_without_client_authority_fails() {
    let fixture = fixture();
    let empty = write(&fixture.scratch.path().join("empty.ca"), "");
    let other = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let start = |options: Vec<String>| {
        let started = runtime.block_on(start(other.path(), &options, CancellationToken::new()));
        format!("{:#}", started.err().unwrap())
    };
    let error = start(options(&fixture.server, &empty));
    assert!(error.contains("(--client-ca): it has no PEM certificate"), "{error}");
    assert!(
        !other.path().join("run").exists(),
        "the unix socket was opened before the certificates were read"
    );
    let error = start(options(&fixture.server, &fixture.client.authority)[..3].to_vec());
    assert!(error.contains("--client-ca"), "{error}");
}
