//! The API server goes away in the midst of provisioning, at chosen moments: connections to it lead through a relay that
//! the test interrupts.

use std::net::Ipv4Addr;

use tokio::sync::watch;

use super::*;

/// What becomes of the connections to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    Open,
    Cut,
}

/// Between the provisioner and the API server.
struct Relay {
    line: watch::Sender<Line>,
    kubeconfig: PathBuf,
    accepting: tokio::task::JoinHandle<()>,
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Relay {
    /// Takes the place of the API server in the kubeconfig of the provisioner here.
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
        let (line, _) = watch::channel(Line::Open);
        let accepting = tokio::spawn(accept(listener, server, line.clone()));
        Relay { line, kubeconfig, accepting }
    }

    fn set(&self, line: Line) {
        self.line.send_replace(line);
    }

    /// Sets the line the moment that the store has made a volume.
    fn set_once_made(&self, volumes: &VolumeModel, line: Line) {
        let sender = self.line.clone();
        volumes.once_made(move || {
            sender.send_replace(line);
        });
    }

    async fn provisioner(&self, cluster: &Cluster) -> Provisioner {
        let writes = ApiWrites::default();
        let client = crate::client(Some(self.kubeconfig.clone()), &writes).await.unwrap();
        cluster.start(HERE, &cluster.volumes, Options::default(), client, writes).await
    }
}

async fn accept(listener: TcpListener, server: SocketAddr, line: watch::Sender<Line>) {
    let mut carried = JoinSet::new();
    while let Ok((client, _peer)) = listener.accept().await {
        if *line.borrow() != Line::Cut
            && let Ok(server) = TcpStream::connect(server).await
        {
            carried.spawn(carry(client, server, line.subscribe()));
        }
    }
}

async fn carry(mut client: TcpStream, mut server: TcpStream, mut line: watch::Receiver<Line>) {
    tokio::select! {
        // First, so that nothing is carried once it is cut.
        biased;
        _cut = line.wait_for(|line| *line == Line::Cut) => {}
        _ended = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
    }
}

impl Cluster {
    fn stored(&self) -> Vec<String> {
        self.volumes.state().volumes.keys().map(ToString::to_string).collect()
    }

    /// That there is one volume, one object, and nothing to be done.
    async fn one_of_each(&self, claim: &str) {
        let object = self.bound(claim).await.name_any();
        assert_eq!(self.stored(), [object.as_str()]);
        let objects = self.objects().list(&ListParams::default()).await.unwrap();
        let of_claim = objects.iter().filter(|object| {
            let claim_ref = object.spec.as_ref().and_then(|spec| spec.claim_ref.as_ref());
            claim_ref.is_some_and(|claim_ref| claim_ref.namespace.as_ref() == Some(&self.namespace))
        });
        assert_eq!(of_claim.count(), 1);
        let settled = || self.intents().list().unwrap().is_empty().then_some(());
        eventually("no record of provisioning", || async { settled() }).await;
    }

    async fn made(&self) {
        eventually("a volume", || async { (self.stored().len() == 1).then_some(()) }).await;
    }

    async fn all_gone(&self, claim: &str) {
        self.delete_claim(claim).await;
        eventually("deleted", || async { self.stored().is_empty().then_some(()) }).await;
    }
}

#[tokio::test]
async fn the_api_server_goes_between_the_volume_and_its_object() {
    let cluster = Cluster::connect().await;
    let relay = Relay::before(&cluster).await;
    let provisioner = relay.provisioner(&cluster).await;
    for claim in ["a", "b"] {
        relay.set_once_made(&cluster.volumes, Line::Cut);
        cluster.claim(claim, json!({})).await;
        cluster.made().await;
        let id = cluster.stored().remove(0);
        assert!(cluster.objects().get_opt(&id).await.unwrap().is_none(), "the API server was gone");
        relay.set(Line::Open);
        cluster.one_of_each(claim).await;
        cluster.all_gone(claim).await;
    }
    provisioner.stop().await;
    cluster.finish().await;
}

#[tokio::test]
async fn the_provisioner_goes_between_the_volume_and_its_object() {
    let cluster = Cluster::connect().await;
    let relay = Relay::before(&cluster).await;
    for vanishes in [false, true] {
        let provisioner = relay.provisioner(&cluster).await;
        relay.set_once_made(&cluster.volumes, Line::Cut);
        cluster.claim("a", json!({})).await;
        cluster.made().await;
        provisioner.kill().await;
        relay.set(Line::Open);
        assert_eq!(cluster.intents().list().unwrap().len(), 1);
        if vanishes {
            cluster.all_gone_by_the_next("a", &relay).await;
            continue;
        }
        let next = relay.provisioner(&cluster).await;
        cluster.one_of_each("a").await;
        cluster.all_gone("a").await;
        next.stop().await;
    }
    cluster.finish().await;
}

impl Cluster {
    /// The claim vanishes while no provisioner runs.
    async fn all_gone_by_the_next(&self, claim: &str, relay: &Relay) {
        self.delete_claim(claim).await;
        self.gone(&self.claims(), claim).await;
        let next = relay.provisioner(self).await;
        eventually("no orphan", || async { self.stored().is_empty().then_some(()) }).await;
        next.stop().await;
    }
}
