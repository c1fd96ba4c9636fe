//! Tests of outages of the API server at chosen moments of provisioning. All connections to it pass through a relay, which the test
//! interrupts.

use std::net::Ipv4Addr;

use tokio::sync::watch;

use super::*;
use crate::api::connection::{self, Timeouts};

/// The state of the connections to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    Open,
    /// Connections are closed.
    Cut,
    /// Connections stay open but forward nothing, not even after new connections work again: as if the API server had lost its
    /// power.
    Dead,
}

/// The state of the line, which every connection observes.
#[derive(Debug)]
struct State {
    line: Line,
    /// How often the line became dead. A connection that is older than the last time stays dead.
    deaths: usize,
}

/// A relay between the provisioner and the API server.
struct Relay {
    state: watch::Sender<State>,
    kubeconfig: PathBuf,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Relay {
    /// Starts a relay and writes a kubeconfig that names it instead of the API server.
    async fn before(cluster: &Cluster) -> Self {
        let directory: PathBuf =
            std::env::var_os("PROVISIONER_KUBECONFIGS").expect("PROVISIONER_KUBECONFIGS").into();
        let text = std::fs::read_to_string(directory.join(format!("{HERE}.kubeconfig"))).unwrap();
        let (_, after) = text.split_once("https://127.0.0.1:").expect("an API server of this machine");
        let port: String = after.chars().take_while(char::is_ascii_digit).collect();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let own = listener.local_addr().unwrap().port();
        let text = text.replace(&format!("https://127.0.0.1:{port}"), &format!("https://127.0.0.1:{own}"));
        let kubeconfig = cluster.scratch.path().join("relayed.kubeconfig");
        std::fs::write(&kubeconfig, text).unwrap();
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port.parse().unwrap()));
        let (state, _) = watch::channel(State { line: Line::Open, deaths: 0 });
        let accepting = tokio::spawn(accept(listener, server, state.clone()));
        Relay { state, kubeconfig, accepting }
    }

    fn set(&self, line: Line) {
        set(&self.state, line);
    }

    async fn is(&self, line: Line) {
        drop(self.state.subscribe().wait_for(|state| state.line == line).await.unwrap());
    }

    /// Sets the line at the moment when the store has created a volume.
    fn set_once_created(&self, volumes: &FakeStore, line: Line) {
        let state = self.state.clone();
        volumes.once_created(move || set(&state, line));
    }

    async fn provisioner(&self, cluster: &Cluster) -> Provisioner {
        self.provisioner_that_waits(cluster, Timeouts::default()).await
    }

    async fn provisioner_that_waits(&self, cluster: &Cluster, timeouts: Timeouts) -> Provisioner {
        let writes = ApiWrites::default();
        let config = crate::api::client::config(Some(self.kubeconfig.clone())).await.unwrap();
        let client = connection::client(config, timeouts, &writes).unwrap();
        cluster.start(HERE, &cluster.volumes, Options::default(), client, writes).await
    }
}

fn set(state: &watch::Sender<State>, line: Line) {
    state.send_modify(|state| {
        state.line = line;
        state.deaths += usize::from(line == Line::Dead);
    });
}

async fn accept(listener: TcpListener, server: SocketAddr, state: watch::Sender<State>) {
    let mut carried = JoinSet::new();
    while let Ok((client, _peer)) = listener.accept().await {
        if state.borrow().line == Line::Open
            && let Ok(server) = TcpStream::connect(server).await
        {
            carried.spawn(carry(client, server, state.subscribe()));
        }
    }
}

async fn carry(mut client: TcpStream, mut server: TcpStream, mut state: watch::Receiver<State>) {
    let deaths = state.borrow().deaths;
    let is_open = tokio::select! {
        // Polled first, so that nothing is forwarded once the line is not open.
        biased;
        _changed = state.wait_for(|state| state.line == Line::Cut || state.deaths != deaths) => false,
        _ended = tokio::io::copy_bidirectional(&mut client, &mut server) => true,
    };
    if !is_open && state.borrow().deaths != deaths {
        // Both sockets stay until the test ends.
        std::future::pending::<()>().await;
    }
}

impl Cluster {
    fn stored(&self) -> Vec<String> {
        self.volumes.state().volumes.keys().map(ToString::to_string).collect()
    }

    /// Checks that there is one volume and one PersistentVolume, and no record of provisioning.
    async fn expect_one_of_each(&self, claim: &str) {
        let object = self.bound(claim).await.name_any();
        assert_eq!(self.stored(), [object.as_str()]);
        let objects = self.objects().list(&ListParams::default()).await.unwrap();
        let of_claim = objects.iter().filter(|object| {
            let claim_ref = object.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            claim_ref.is_some_and(|claim_ref| claim_ref.namespace.as_ref() == Some(&self.namespace))
        });
        assert_eq!(of_claim.count(), 1);
        let no_records = || self.intents().list().unwrap().is_empty().then_some(());
        eventually("no record of provisioning", || async { no_records() }).await;
    }

    async fn volume_exists(&self) {
        eventually("a volume", || async { (self.stored().len() == 1).then_some(()) }).await;
    }

    async fn delete_claim_and_wait(&self, claim: &str) {
        self.delete_claim(claim).await;
        eventually("deleted", || async { self.stored().is_empty().then_some(()) }).await;
    }
}

#[tokio::test]
async fn one_volume_and_persistent_volume_exist_after_an_api_server_outage_between_them() {
    let cluster = Cluster::connect().await;
    let relay = Relay::before(&cluster).await;
    let provisioner = relay.provisioner(&cluster).await;
    for claim in ["a", "b"] {
        relay.set_once_created(&cluster.volumes, Line::Cut);
        cluster.claim(claim, json!({})).await;
        cluster.volume_exists().await;
        let id = cluster.stored().remove(0);
        assert!(cluster.objects().get_opt(&id).await.unwrap().is_none(), "the API server was unreachable");
        relay.set(Line::Open);
        cluster.expect_one_of_each(claim).await;
        cluster.delete_claim_and_wait(claim).await;
    }
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn claims_are_served_on_new_connections_after_a_silent_outage() {
    let cluster = Cluster::connect().await;
    let relay = Relay::before(&cluster).await;
    let timeouts = Timeouts { request: Duration::from_secs(2), silence: Duration::from_secs(3) };
    let provisioner = relay.provisioner_that_waits(&cluster, timeouts).await;
    cluster.claim("before", json!({})).await;
    cluster.bound("before").await;

    // The request that creates the PersistentVolume gets no response, and no watch delivers anything.
    relay.set_once_created(&cluster.volumes, Line::Dead);
    cluster.claim("during", json!({})).await;
    relay.is(Line::Dead).await;
    relay.set(Line::Open);
    cluster.bound("during").await;
    cluster.claim("after", json!({})).await;
    cluster.bound("after").await;

    for claim in ["before", "during", "after"] {
        cluster.delete_claim(claim).await;
    }
    eventually("deleted", || async { cluster.stored().is_empty().then_some(()) }).await;
    cluster.finish([provisioner]).await;
}

#[tokio::test]
async fn a_provisioner_crash_between_volume_and_persistent_volume_leaves_no_orphan() {
    let cluster = Cluster::connect().await;
    let relay = Relay::before(&cluster).await;
    for deletes_claim in [false, true] {
        let provisioner = relay.provisioner(&cluster).await;
        relay.set_once_created(&cluster.volumes, Line::Cut);
        cluster.claim("a", json!({})).await;
        cluster.volume_exists().await;
        provisioner.kill().await;
        relay.set(Line::Open);
        assert_eq!(cluster.intents().list().unwrap().len(), 1);
        if deletes_claim {
            cluster.delete_claim_without_provisioner("a", &relay).await;
            continue;
        }
        let next = relay.provisioner(&cluster).await;
        cluster.expect_one_of_each("a").await;
        cluster.delete_claim_and_wait("a").await;
        next.stop().await;
    }
    cluster.finish([]).await;
}

impl Cluster {
    /// Deletes the claim while no provisioner runs. Waits until the next one has deleted the volume.
    async fn delete_claim_without_provisioner(&self, claim: &str, relay: &Relay) {
        self.delete_claim(claim).await;
        self.wait_until_deleted(&self.claims(), claim).await;
        let next = relay.provisioner(self).await;
        eventually("no orphan", || async { self.stored().is_empty().then_some(()) }).await;
        next.stop().await;
    }
}
