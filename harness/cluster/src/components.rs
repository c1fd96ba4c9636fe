//! The command lines of the control plane's components, without options that repeat a default.

use std::ffi::OsString;
use std::net::SocketAddrV4;
use std::path::Path;

use super::layout::{ClusterProfile, Durability, Layout};

/// The name of etcd's unix socket for clients, relative to its working directory. etcd requires the form
/// `host:port` even for a socket, and the file it creates has exactly that name. Without a TCP port, only
/// this user can connect.
pub(crate) const ETCD_CLIENT_SOCKET: &str = "client:0";
pub(crate) const ETCD_PEER_SOCKET: &str = "peer:0";
/// The directory of etcd's data, in etcd's directory.
pub(crate) const ETCD_DATA: &str = "data";

/// The addresses of services. The API server's own is the first.
const SERVICE_CIDR: &str = "10.96.0.0/16";
pub(crate) const API_SERVICE_ADDRESS: &str = "10.96.0.1";
/// The address of the host's loopback inside a guest on QEMU's user network. With it, pods find the API
/// server through the `kubernetes` service, as in any cluster.
pub(crate) const HOST_SEEN_FROM_GUEST: &str = "10.0.2.2";

/// The rate limit of kube-controller-manager's requests, per second and in a burst. It never sends that many.
const UNTHROTTLED: u32 = 10_000;

/// The size at which the API server starts a new audit log, larger than that of any run. With the default of 100 MiB, benchmarks that read
/// the log from an offset would miss the requests before.
const AUDIT_LOG_MEBIBYTES: u32 = 10_240;

/// Returns the audit policy: metadata of all requests, without their content. A watch is logged when it starts, and each other request
/// when it ends.
pub(crate) fn audit_policy() -> serde_json::Value {
    serde_json::json!({
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "rules": [
            {
                "level": "Metadata",
                "verbs": ["watch"],
                "omitStages": ["RequestReceived", "ResponseComplete"],
            },
            {
                "level": "Metadata",
                "verbs": ["create", "update", "patch", "delete", "deletecollection", "get", "list"],
                "omitStages": ["RequestReceived", "ResponseStarted"],
            },
            {"level": "None"},
        ],
    })
}

pub(crate) fn etcd(durability: Durability) -> Vec<OsString> {
    let mut args = strings([
        "--name=control-plane",
        &format!("--data-dir={ETCD_DATA}"),
        &format!("--listen-client-urls=unix://{ETCD_CLIENT_SOCKET}"),
        &format!("--advertise-client-urls=unix://{ETCD_CLIENT_SOCKET}"),
        &format!("--listen-peer-urls=unix://{ETCD_PEER_SOCKET}"),
        &format!("--initial-advertise-peer-urls=unix://{ETCD_PEER_SOCKET}"),
        &format!("--initial-cluster=control-plane=unix://{ETCD_PEER_SOCKET}"),
        "--log-level=warn",
    ]);
    if durability == Durability::Unsafe {
        args.push("--unsafe-no-fsync".into());
    }
    args
}

/// Returns the API server's arguments. The API server runs in etcd's directory, which has the socket.
pub(crate) fn api_server(layout: &Layout, listen: SocketAddrV4, profile: ClusterProfile) -> Vec<OsString> {
    let mut args = strings([
        &format!("--bind-address={}", listen.ip()),
        &format!("--secure-port={}", listen.port()),
        &format!("--advertise-address={HOST_SEEN_FROM_GUEST}"),
        &format!("--etcd-servers=unix://{ETCD_CLIENT_SOCKET}"),
        &format!("--service-cluster-ip-range={SERVICE_CIDR}"),
        "--service-account-issuer=https://kubernetes.default.svc",
        "--authorization-mode=Node,RBAC",
        "--anonymous-auth=false",
        "--enable-admission-plugins=NodeRestriction",
        // The driver's mounts must propagate to the kubelet, which requires a privileged container.
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
        "--profiling=false",
        // No certificate is signed by this authority, because there are no aggregated API servers. The option
        // prevents complaints of the other components that it is missing.
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--v=1",
    ]);
    args.extend([
        flag("--client-ca-file", &layout.pki("ca.crt")),
        flag("--tls-cert-file", &layout.pki("apiserver.crt")),
        flag("--tls-private-key-file", &layout.pki("apiserver.key")),
        flag("--kubelet-certificate-authority", &layout.pki("ca.crt")),
        flag("--kubelet-client-certificate", &layout.pki("apiserver-kubelet-client.crt")),
        flag("--kubelet-client-key", &layout.pki("apiserver-kubelet-client.key")),
        flag("--service-account-key-file", &layout.pki("service-account.pub")),
        flag("--service-account-signing-key-file", &layout.pki("service-account.key")),
        flag("--requestheader-client-ca-file", &layout.pki("front-proxy-ca.crt")),
    ]);
    if profile == ClusterProfile::Benchmark {
        args.push(flag("--audit-policy-file", &layout.audit_policy()));
        args.push(flag("--audit-log-path", &layout.log("audit")));
        args.push(format!("--audit-log-maxsize={AUDIT_LOG_MEBIBYTES}").into());
    }
    args
}

pub(crate) fn controller_manager(
    layout: &Layout,
    listen: SocketAddrV4,
    profile: ClusterProfile,
) -> Vec<OsString> {
    let mut args = secured(layout, "controller-manager", listen);
    args.extend([
        // Each controller has a service account with only the rights it needs, as in a hardened cluster.
        "--use-service-account-credentials=true".into(),
        flag("--root-ca-file", &layout.pki("ca.crt")),
        // The default is a system directory, which the controller manager would create.
        flag("--flex-volume-plugin-dir", &layout.root.join("flex-volume-plugins")),
        flag("--service-account-private-key-file", &layout.pki("service-account.key")),
    ]);
    if profile == ClusterProfile::Benchmark {
        args.extend(strings([
            &format!("--kube-api-qps={UNTHROTTLED}"),
            &format!("--kube-api-burst={UNTHROTTLED}"),
        ]));
    }
    args
}

/// Returns the options that the scheduler and the controller manager share: one identity as a client, one
/// certificate as a server, and no leader election.
pub(crate) fn secured(layout: &Layout, component: &str, listen: SocketAddrV4) -> Vec<OsString> {
    let kubeconfig = layout.kubeconfig(component);
    let mut args = strings([
        &format!("--bind-address={}", listen.ip()),
        &format!("--secure-port={}", listen.port()),
        "--leader-elect=false",
        "--profiling=false",
        "--v=1",
    ]);
    args.extend([
        flag("--kubeconfig", &kubeconfig),
        flag("--authentication-kubeconfig", &kubeconfig),
        flag("--authorization-kubeconfig", &kubeconfig),
        flag("--client-ca-file", &layout.pki("ca.crt")),
        flag("--tls-cert-file", &layout.pki(&format!("{component}.crt"))),
        flag("--tls-private-key-file", &layout.pki(&format!("{component}.key"))),
    ]);
    args
}

fn strings<const N: usize>(args: [&str; N]) -> Vec<OsString> {
    args.into_iter().map(OsString::from).collect()
}

/// Returns the argument `NAME=PATH`.
pub(crate) fn flag(name: &str, path: &Path) -> OsString {
    let mut flag = OsString::from(name);
    flag.push("=");
    flag.push(path);
    flag
}
