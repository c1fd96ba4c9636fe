package main

// changed are the modules whose sources the overlay changes, and the changes.
var changed = []module{
	{
		path: "k8s.io/kubernetes",
		edits: map[string][]edit{
			// The kubelet binds a second loop device to each block device of a pod, to hold the first one open. It finds
			// it again by reading the backing file of every loop device. Volumes of loopfs need neither: the driver
			// refuses to detach a device whose node is published.
			"pkg/volume/util/util.go": {
				removal{function: "MapBlockVolume", method: "AttachFileDevice"},
				removal{function: "UnmapBlockVolume", method: "DetachFileDevice"},
			},
		},
	},
	{
		path: "k8s.io/mount-utils",
		edits: map[string][]edit{
			// The kubelet runs mount(8) and umount(8), and both through systemd-run where there is one.
			"mount_linux.go": {
				insertion{"func (mounter *Mounter) doMount(mounterPath string, mountCmd string, source string, target string, fstype string, " +
					"options []string, sensitiveOptions []string, mountFlags []string, systemdMountRequired bool) error",
					"if known, err := nativeMount(mounterPath, mountCmd, source, target, fstype, options, sensitiveOptions, mountFlags); known {\n\t\treturn err\n\t}"},
				insertion{"func (mounter *Mounter) Unmount(target string) error",
					"if known, err := nativeUnmount(target, 0, mounter.withSafeNotMountedBehavior); known {\n\t\treturn err\n\t}"},
				insertion{"func tryUnmount(target string, withSafeNotMountedBehavior bool, unmountTimeout time.Duration) error",
					"if known, err := nativeTryUnmount(target, withSafeNotMountedBehavior, unmountTimeout); known {\n\t\treturn err\n\t}"},
				insertion{"func forceUmount(target string, withSafeNotMountedBehavior bool) error",
					"if known, err := nativeUnmount(target, unix.MNT_FORCE, withSafeNotMountedBehavior); known {\n\t\treturn err\n\t}"},
				// The kernel reports that nothing is mounted at a path, and umount(8) of util-linux does too.
				insertion{"func detectSafeNotMountedBehavior() bool", "return true"},
			},
		},
		added: map[string]string{
			"native/mounting":       "native/mounting",
			"native_mount_linux.go": "_glue/mount.go",
		},
	},
}
