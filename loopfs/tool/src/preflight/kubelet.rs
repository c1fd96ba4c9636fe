//! The judgement of the kubelet's directory.

use std::path::Path;

use loopfs::mount::Isolation;

use super::check::Check;
use super::facts::{Kubelet, KubeletDirectory, KubeletMount};
use crate::shell::quoted;

const DIRECTORY: &str = "kubelet-dir";
const PROPAGATION: &str = "propagation";

pub(super) fn judge(kubelet: Option<&Kubelet>) -> Vec<Check> {
    match kubelet {
        Some(kubelet) => vec![directory(kubelet), propagation(kubelet)],
        None => [DIRECTORY, PROPAGATION]
            .map(|id| Check::not_checked(id, "no directory of a kubelet was given (--kubelet-dir)"))
            .into(),
    }
}

/// Judges whether the kubelet uses this directory under this path. It passes paths below its `--root-dir` to the driver, which accepts only
/// paths below its own `--kubelet-dir`, and follows no symbolic link there.
fn directory(kubelet: &Kubelet) -> Check {
    let path = kubelet.path.display();
    let Some(resolved) = &kubelet.resolved else {
        return Check::not_checked(DIRECTORY, format!("{path} cannot be found"));
    };
    if let Some(link) = kubelet.mounted.iter().find(|directory| directory.is_link) {
        return Check::missing(
            DIRECTORY,
            format!("{} is a symbolic link, which the driver does not follow", link.path.display()),
            format!(
                "replace it by a directory, and mount the target of the link there (`mount --bind`), or move all of {path} with the \
                 --root-dir of the kubelet"
            ),
        );
    }
    if let Some(used) = kubelet.in_use.first()
        && !kubelet.in_use.contains(resolved)
    {
        return Check::missing(
            DIRECTORY,
            format!(
                "the pods of this node have their volumes below {}, and not below {path}",
                used.display()
            ),
            format!("give the driver the directory of the kubelet: `--kubelet-dir {}`", quoted(used)),
        );
    }
    if *resolved != kubelet.path {
        return Check::warning(
            DIRECTORY,
            format!("{path} leads through a symbolic link to {}", resolved.display()),
            "give the driver the one of the two paths that the kubelet has as --root-dir; it refuses the other at the first pod",
        );
    }
    Check::ok(DIRECTORY, format!("no pod has volumes outside of {path}, which is no symbolic link"))
}

/// Judges whether the containers of pods see the volumes that the driver mounts in the kubelet's directories.
fn propagation(kubelet: &Kubelet) -> Check {
    let mut found = Vec::new();
    let mut not_shared = None;
    for KubeletDirectory { path, mount, .. } in &kubelet.mounted {
        let shown = path.display();
        match mount {
            Err(failure) if failure.is_denied() => {
                return Check::not_checked(PROPAGATION, &failure.message).with_remedy("check as root");
            }
            Err(failure) => {
                let remedy =
                    "start the kubelet, which creates the directory, or give the --root-dir of the kubelet";
                return Check::missing(PROPAGATION, &failure.message, remedy);
            }
            Ok(KubeletMount { mount_point, read_only: true, .. }) => {
                return Check::missing(
                    PROPAGATION,
                    format!("{shown} is in the mount at {}, which is read-only", mount_point.display()),
                    format!(
                        "mount a writable file system at {}, or give another --root-dir to the kubelet; in a container, mount \
                         the directory without `ro`",
                        kubelet.path.display()
                    ),
                );
            }
            Ok(KubeletMount { mount_point, isolation: Some(isolation), .. }) => {
                return Check::missing(
                    PROPAGATION,
                    format!(
                        "{shown} is in the mount at {}, which {isolation}, so no pod sees a volume that the driver mounts here",
                        mount_point.display()
                    ),
                    remedy(*isolation, mount_point),
                );
            }
            Ok(KubeletMount { mount_point, shared: false, .. }) => {
                not_shared.get_or_insert_with(|| {
                    Check::warning(
                        PROPAGATION,
                        format!(
                            "{shown} is in the mount at {}, which is not shared: only a driver outside containers can publish \
                             volumes there",
                            mount_point.display()
                        ),
                        format!(
                            "for a driver in a container, as the DaemonSet starts it, run `mount --make-rshared {}` before the \
                             kubelet starts",
                            quoted(mount_point)
                        ),
                    )
                });
            }
            Ok(_) => found.push(shown.to_string()),
        }
    }
    not_shared
        .unwrap_or_else(|| Check::ok(PROPAGATION, format!("{} are in shared mounts", found.join(" and "))))
}

fn remedy(isolation: Isolation, mount_point: &Path) -> String {
    const APART: &str = "in a container, mount the directory with Bidirectional propagation (Docker: `:rshared`); in a systemd \
                         service, remove the settings that give the service a mount namespace, such as PrivateMounts= and \
                         PrivateTmp=";
    match isolation {
        // The mount is shared already.
        Isolation::NoPeers => APART.to_owned(),
        _ => format!(
            "run `mount --make-rshared {}` on the host before the kubelet starts; {APART}",
            quoted(mount_point)
        ),
    }
}

#[cfg(test)]
mod tests {
    use loopfs::ErrorKind;
    use rstest::rstest;

    use super::*;
    use crate::preflight::check::Status;
    use crate::preflight::facts::Failure;
    use crate::preflight::facts::tests::kubelet;
    use crate::preflight::tests::assert_check;

    fn mount(kubelet: &mut Kubelet) -> &mut KubeletMount {
        kubelet.mounted[1].mount.as_mut().unwrap()
    }

    /// The remedy must not tell the user to make a mount shared that is shared already.
    #[test]
    fn a_shared_mount_is_not_reshared() {
        let remedies =
            [Isolation::NoPeers, Isolation::ReceivesOnly].map(|isolation| remedy(isolation, Path::new("/k")));
        assert_eq!(remedies.map(|remedy| remedy.contains("--make-rshared")), [false, true]);
    }

    /// The kernel tests have further facts.
    #[rstest]
    #[case::absent_directory(DIRECTORY, |k: &mut Kubelet| k.resolved = None, Status::NotChecked, "")]
    #[case::linked_pods(DIRECTORY, |k: &mut Kubelet| k.mounted[0].is_link = true, Status::Missing, "mount --bind")]
    #[case::other_kubelet(DIRECTORY, |k: &mut Kubelet| k.in_use = vec!["/var/lib/k0s/kubelet".into()], Status::Missing, "`--kubelet-dir /var/lib/k0s/kubelet`")]
    #[case::two_kubelets(DIRECTORY, |k: &mut Kubelet| k.in_use.insert(0, "/other".into()), Status::Ok, "")]
    #[case::no_pods(DIRECTORY, |k: &mut Kubelet| k.in_use.clear(), Status::Ok, "")]
    #[case::linked_directory(DIRECTORY, |k: &mut Kubelet| {
        (k.resolved, k.in_use) = (Some("/data/kubelet".into()), vec!["/data/kubelet".into()]);
    }, Status::Warning, "--root-dir")]
    #[case::private_with_a_space(PROPAGATION, |k: &mut Kubelet| {
        let mount = mount(k);
        (mount.mount_point, mount.isolation) = ("/mnt/a b".into(), Some(Isolation::Private));
    }, Status::Missing, "`mount --make-rshared '/mnt/a b'`")]
    #[case::private_on_the_node_with_a_space(PROPAGATION, |k: &mut Kubelet| {
        let mount = mount(k);
        (mount.mount_point, mount.shared) = ("/mnt/a b".into(), false);
    }, Status::Warning, "`mount --make-rshared '/mnt/a b'`")]
    #[case::read_only(PROPAGATION, |k: &mut Kubelet| mount(k).read_only = true, Status::Missing, "writable file system at /var/lib/kubelet")]
    #[case::absent(PROPAGATION, |k: &mut Kubelet| {
        k.mounted[0].mount = Err(Failure { kind: ErrorKind::Other, message: "open /k/pods".to_owned() });
    }, Status::Missing, "start the kubelet")]
    #[case::denied(PROPAGATION, |k: &mut Kubelet| {
        k.mounted[0].mount = Err(Failure { kind: ErrorKind::PermissionDenied, message: "open /k/pods".to_owned() });
    }, Status::NotChecked, "root")]
    fn each_fact_decides_its_status(
        #[case] id: &str,
        #[case] change: fn(&mut Kubelet),
        #[case] status: Status,
        #[case] remedy: &str,
    ) {
        let mut kubelet = kubelet();
        change(&mut kubelet);
        assert_check(&judge(Some(&kubelet)), id, status, remedy);
    }
}
