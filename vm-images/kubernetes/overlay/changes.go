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
			// The kubelet measures volumes by a walk over their files.
			"pkg/volume/util/fs/fs.go": {
				insertion{"func DiskUsage(path string) (UsageInfo, error)",
					"if usage, known := nativeUsage(path); known {\n\t\treturn usage, nil\n\t}"},
			},
			// The kubelet runs xfs_quota and lsattr.
			"pkg/volume/util/fsquota/common/quota_common_linux_impl.go": {
				insertion{"func SupportsQuotas(mountpoint string, qType QuotaType) (bool, error)",
					"if nativeQuota() {\n\t\treturn nativeSupportsQuotas(mountpoint, qType)\n\t}"},
				insertion{"func (v linuxVolumeQuotaApplier) GetQuotaOnDir(path string) (QuotaID, error)",
					"if nativeQuota() {\n\t\treturn nativeGetQuotaOnDir(path)\n\t}"},
				insertion{"func (v linuxVolumeQuotaApplier) SetQuotaOnDir(path string, id QuotaID, bytes int64) error",
					"if nativeQuota() {\n\t\treturn nativeSetQuotaOnDir(v.mountpoint, path, id, bytes, v.maxQuota)\n\t}"},
				insertion{"func getQuantity(mountpoint string, id QuotaID, xfsQuotaArg string, multiplier int64, allowEmptyOutput bool) (int64, error)",
					"if nativeQuota() {\n\t\treturn nativeGetQuantity(mountpoint, id, xfsQuotaArg, allowEmptyOutput)\n\t}"},
			},
		},
		added: map[string]string{
			"pkg/volume/util/fs/native/usage":          "native/usage",
			"pkg/volume/util/fs/native_usage.go":       "_glue/fs.go",
			"pkg/volume/util/fsquota/native/quota":     "native/quota",
			"pkg/volume/util/fsquota/common/native.go": "_glue/fsquota.go",
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
