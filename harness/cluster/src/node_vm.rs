//! The virtual machine of a node. If it ends by itself, every wait for the cluster ends with the cause: what is waited for
//! needs the node, so its deadline would only pass, and the message would name an object that did nothing wrong.
//!
//! The record of these machines belongs to the process, because a wait has a client of the API server, which does not know
//! them.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Result, bail};
use testvm::vm::{Control, Phase, Vm};
use tokio::sync::watch;

/// The machines that are meant to run, and for each that ended the message about it.
static MACHINES: LazyLock<watch::Sender<BTreeMap<u64, Option<String>>>> =
    LazyLock::new(watch::Sender::default);

/// A machine that is meant to run until its owner ends it. Dropping it cuts its power.
#[derive(Debug)]
pub(crate) struct NodeVm {
    // Dropped first: the end of the machine is intended then.
    record: Record,
    vm: Vm,
}

impl NodeVm {
    pub(crate) fn new(vm: Vm) -> NodeVm {
        NodeVm { record: Record::new(vm.name(), vm.phase()), vm }
    }

    pub(crate) fn control(&self) -> &Control {
        self.vm.control()
    }

    /// Cuts the power like [`Vm::power_cut`].
    pub(crate) async fn power_cut(self) -> Result<()> {
        drop(self.record);
        self.vm.power_cut().await
    }

    /// Shuts the machine down like [`Vm::power_off`].
    pub(crate) async fn power_off(self) -> Result<()> {
        drop(self.record);
        self.vm.power_off().await
    }
}

/// Runs `wait` to its end, or until the machine of a node has ended by itself.
///
/// # Errors
/// The error of `wait`, or that a machine has ended: its name, the cause and the end of its console.
pub async fn unless_node_ends<T>(wait: impl Future<Output = Result<T>>) -> Result<T> {
    let mut machines = MACHINES.subscribe();
    let ended = machines.wait_for(|machines| machines.values().any(Option::is_some));
    // On the heap, or the future of every caller would have it twice.
    let wait = Box::pin(wait);
    tokio::select! {
        biased;
        result = wait => result,
        Ok(machines) = ended => match machines.values().find_map(Option::as_ref) {
            Some(cause) => bail!("{cause}"),
            None => bail!("the machine of a node ended"),
        },
    }
}

/// The entry of a machine in [`MACHINES`].
#[derive(Debug)]
struct Record(u64);

impl Record {
    fn new(name: &str, mut phase: watch::Receiver<Phase>) -> Record {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        MACHINES.send_modify(|machines| drop(machines.insert(id, None)));
        let name = name.to_owned();
        tokio::spawn(async move {
            let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_))).await;
            // The channel closes when the owner drops the machine.
            let Ok(Phase::Ended(reason)) = ended.as_deref() else { return };
            let cause = reason.failure().unwrap_or("it was powered off");
            let message = format!("the virtual machine of {name} ended by itself: {cause}");
            // There is no entry if the owner ends the machine.
            MACHINES.send_if_modified(|machines| {
                machines.get_mut(&id).is_some_and(|entry| entry.replace(message).is_none())
            });
        });
        Record(id)
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        MACHINES.send_modify(|machines| drop(machines.remove(&self.0)));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::api::core::v1::Pod;
    use kube::runtime::watcher;
    use kube::{Api, Client};
    use tokio::time::timeout;

    use testvm::vm::ExitReason;

    use super::*;
    use crate::waiting::{State, until, until_logged};

    const PROMPT: Duration = Duration::from_secs(5);
    const DEADLINE: Duration = Duration::from_secs(600);

    // One test, because the machines are those of the whole process.
    /// The error has the cause, and the end of a machine by its owner fails no wait.
    #[tokio::test]
    async fn waits_fail_when_machine_ends_unexpectedly() {
        // No connection to this listener is accepted, so the API server never responds.
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let client = Client::try_from(kube::Config::new(server.parse().unwrap())).unwrap();
        let pods: Api<Pod> = Api::namespaced(client, "default");
        let wait = || until(pods.clone(), watcher::Config::default(), DEADLINE, |_| State::Ready);

        let (phase, receiver) = watch::channel(Phase::Ready);
        let record = Record::new("node-7", receiver);
        let end =
            async { drop(phase.send_replace(Phase::Ended(ExitReason::Crashed("Kernel panic".to_owned())))) };
        let (waited, ()) = tokio::join!(timeout(PROMPT, wait()), end);
        let message = format!("{:#}", waited.expect("the wait ends before its deadline").unwrap_err());
        assert_eq!(message, "the virtual machine of node-7 ended by itself: Kernel panic");
        let logged = until_logged(&pods, "pod", None, DEADLINE, |_| State::Ready);
        let logged = timeout(PROMPT, logged).await.expect("the wait ends before its deadline");
        assert!(format!("{:#}", logged.unwrap_err()).contains("node-7"));

        drop(record);
        let (phase, receiver) = watch::channel(Phase::Ready);
        drop(Record::new("node-8", receiver));
        phase.send_replace(Phase::Ended(ExitReason::Passed));
        assert!(timeout(Duration::from_millis(200), wait()).await.is_err(), "the wait goes on");
    }
}
