//go:build linux

package common

import (
	"errors"
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"k8s.io/kubernetes/pkg/volume/util/fsquota/native/quota"
)

// nativeQuota returns true if the kernel reads and sets quotas by system calls that need no device node. Otherwise
// xfs_quota and lsattr are run.
var nativeQuota = sync.OnceValue(quota.Supported)

// nativeSupportsQuotas replaces `xfs_quota -c "state -p"`.
func nativeSupportsQuotas(mountpoint string, qType QuotaType) (bool, error) {
	accounting, enforced, err := quota.State(mountpoint)
	if qType == FSQuotaEnforcing {
		return enforced, err
	}
	return accounting, err
}

// nativeGetQuotaOnDir replaces `lsattr -pd`.
func nativeGetQuotaOnDir(path string) (QuotaID, error) {
	project, err := quota.ProjectOf(path)
	if err != nil {
		return BadQuotaID, err
	}
	id := QuotaID(project)
	if id < 0 {
		return BadQuotaID, fmt.Errorf("the project id %d of %s is larger than a QuotaID can be", project, path)
	}
	return id, nil
}

// nativeSetQuotaOnDir replaces `xfs_quota -x -c "limit -p"` and `xfs_quota -x -c "project -s"`.
func nativeSetQuotaOnDir(mountpoint, path string, id QuotaID, bytes, maxQuota int64) error {
	if bytes < 0 || bytes > maxQuota {
		bytes = maxQuota
	}
	if err := quota.SetLimit(mountpoint, uint32(id), bytes); err != nil {
		return err
	}
	return quota.Assign(path, uint32(id))
}

// nativeGetQuantity replaces `xfs_quota -c "quota -p"`. The argument -i requests inodes, and -b bytes.
func nativeGetQuantity(mountpoint string, id QuotaID, xfsQuotaArg string, allowEmptyOutput bool) (int64, error) {
	usage, err := quota.OfProject(mountpoint, uint32(id))
	if errors.Is(err, unix.ENOENT) && allowEmptyOutput {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	if xfsQuotaArg == "-i" {
		return usage.Inodes, nil
	}
	return usage.Bytes, nil
}
