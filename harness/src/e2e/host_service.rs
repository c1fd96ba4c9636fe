//! Runs the driver as services of the node, from the Debian package, as the page about them says: the main flow passes without any pod
//! of the driver, and the package is removed.

use anyhow::Result;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt};
use testvm::report::Report;
use testvm::session::Session;
use testvm::steps::{StepResult, Steps};
use testvm_cluster::kind::KindMachine;
use testvm_cluster::objects;

use super::console::{self, Block, Place, TIMEOUT, on_node};
use super::stories::{flow, removal};
use crate::test_env::environment::TestEnv;
use crate::test_env::workload::create_namespace;

/// The name of the story, and of the two that it runs on the services.
const NAME: &str = "host service";
const FLOW: &str = "host service: flow";
const REMOVAL: &str = "host service: removal";

const PAGE: &str = "docs/src/host-service.md";
/// The directory of the checkout that has the package.
pub(super) const PACKAGES: &str = "target/deb";
/// The namespace of the pods of Kubernetes itself, of which kube-proxy is privileged.
const OF_KUBERNETES: &str = "kube-system";

/// The blocks that install the driver.
pub(super) const INSTALLATION: [Block; 5] = [
    Block {
        place: Place::Node,
        before: "docker cp target/deb/. kind-control-plane:/root",
        ..Block::new(PAGE, "# dpkg --install loopfs_*_amd64.deb")
    },
    Block::new(PAGE, "$ kubectl apply -k csi/examples/host-service"),
    Block {
        place: Place::Home,
        filled_in: &[(" NODE", " kind-control-plane"), ("API-SERVER", "kind-control-plane")],
        shows: &["Switched to context \"loopfs\""],
        ..Block::new(
            PAGE,
            "$ kubectl -n loopfs-system create token loopfs-provisioner --bound-object-kind Node --bound-object-name NODE --duration 8760h | tr -d '\\n' > token",
        )
    },
    Block {
        place: Place::Node,
        before: "for file in token kubeconfig; do docker cp ~root/$file kind-control-plane:/etc/loopfs/; done",
        shows: &["loopfs-csi.service", "loopfs-provisioner.service"],
        ..Block::new(PAGE, "# chown root:loopfs-provisioner /etc/loopfs/token /etc/loopfs/kubeconfig")
    },
    Block {
        filled_in: &[(" NODE", " kind-control-plane")],
        shows: &["csi.loopfs.dev", "loopfs-system"],
        ..Block::new(
            PAGE,
            "$ until kubectl get csinode NODE --output 'jsonpath={.spec.drivers[*].name}' | grep --word-regexp csi.loopfs.dev; do sleep 1; done",
        )
    },
];

/// The blocks that remove it.
pub(super) const UNINSTALLATION: [Block; 2] = [
    Block {
        place: Place::Node,
        ..Block::new(PAGE, "# systemctl disable --now loopfs-csi loopfs-provisioner")
    },
    Block::new(PAGE, "$ kubectl delete -k csi/examples/host-service --ignore-not-found"),
];

/// Kills both services. systemd starts them again.
const KILL: &str = "systemctl kill --signal=KILL loopfs-csi loopfs-provisioner";
/// Prints how often each service was restarted, and which parts of its settings systemd rates.
const SERVICES: &str = "for service in loopfs-csi loopfs-provisioner; do
    test \"$(systemctl show --property NRestarts --value $service)\" = 1
    systemctl is-active $service
    journalctl --no-pager --unit $service | grep -c loopfs
    systemd-analyze security --no-pager $service | tail -1
done
test \"$(stat --format %a:%U:%G /run/loopfs/control.sock)\" = 660:root:loopfs-provisioner
test \"$(ps -o user= -p $(systemctl show --property MainPID --value loopfs-provisioner))\" != root";

/// Installs the services, runs the main flow on them, and leaves them running.
pub(super) async fn run(
    session: &Session,
    report: &mut Report,
    machine: &KindMachine,
    env: &TestEnv<'_>,
) -> StepResult {
    let mut steps = Steps::begin(session, report, NAME);
    console::paste_all(&mut steps, machine, &INSTALLATION).await?;
    steps.step("no pod of the cluster is privileged, except those of Kubernetes", unprivileged(env)).await?;
    steps.step("kill both services", machine.shell(&on_node(KILL), TIMEOUT)).await?;
    let created = create_namespace(&env.client, &env.namespace);
    steps.step("create the namespace of the stories", created).await?;
    flow::run_on_services(&mut Steps::begin(session, report, FLOW), env).await?;
    removal::run(&mut Steps::begin(session, report, REMOVAL), env, None).await?;
    let mut steps = Steps::begin(session, report, NAME);
    let commands = on_node(SERVICES);
    let services = machine.shell(&commands, TIMEOUT);
    steps
        .step(
            "both services were restarted once and log to the journal, and the provisioner is not root",
            services,
        )
        .await
        .map(drop)
}

/// Removes the services and their objects.
pub(super) async fn remove(session: &Session, report: &mut Report, machine: &KindMachine) -> StepResult {
    console::paste_all(&mut Steps::begin(session, report, NAME), machine, &UNINSTALLATION).await
}

/// Checks that no container outside of Kubernetes's own namespace is privileged, and that the driver has no pod.
async fn unprivileged(env: &TestEnv<'_>) -> Result<()> {
    let of_driver = env.driver_pods_if_any().await?;
    anyhow::ensure!(of_driver.is_empty(), "the driver has {} pods", of_driver.len());
    let pods: Api<Pod> = Api::all(env.client.clone());
    for pod in objects::list(&pods, "").await? {
        let spec = pod.spec.as_ref();
        let mut containers = spec.into_iter().flat_map(|spec| &spec.containers);
        let privileged = containers.any(|container| {
            container.security_context.as_ref().and_then(|context| context.privileged) == Some(true)
        });
        let own = pod.namespace().as_deref() == Some(OF_KUBERNETES);
        anyhow::ensure!(own || !privileged, "pod {} is privileged", pod.name_any());
    }
    Ok(())
}
