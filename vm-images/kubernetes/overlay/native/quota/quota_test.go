//go:build linux && (amd64 || arm64 || riscv64)

package quota

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The C compiler prints each number of the kernel headers beside the one that this package uses.
func TestNumbersAndLayoutsAreThoseOfTheKernelHeaders(t *testing.T) {
	var quota diskQuota
	var state quotaState
	var attributes attributes
	numbers := []struct {
		expression string
		number     uintptr
	}{
		{"PRJQUOTA", projectQuota},
		{"Q_XGETQUOTA", getQuota},
		{"Q_XSETQLIM", setLimits},
		{"Q_XGETQSTATV", getState},
		{"FS_DQUOT_VERSION", quotaVersion},
		{"FS_QSTATV_VERSION1", stateVersion},
		{"FS_PROJ_QUOTA", projectQuotaFlag},
		{"FS_DQ_BSOFT", blockSoftLimit},
		{"FS_DQ_BHARD", blockHardLimit},
		{"FS_QUOTA_PDQ_ACCT", projectAccounting},
		{"FS_QUOTA_PDQ_ENFD", projectEnforced},
		{"FS_IOC_FSGETXATTR", getAttributes},
		{"FS_IOC_FSSETXATTR", setAttributes},
		{"FS_XFLAG_PROJINHERIT", inherit},
		{"sizeof(struct fs_disk_quota)", unsafe.Sizeof(quota)},
		{"offsetof(struct fs_disk_quota, d_fieldmask)", unsafe.Offsetof(quota.fieldmask)},
		{"offsetof(struct fs_disk_quota, d_id)", unsafe.Offsetof(quota.id)},
		{"offsetof(struct fs_disk_quota, d_blk_hardlimit)", unsafe.Offsetof(quota.blockHard)},
		{"offsetof(struct fs_disk_quota, d_blk_softlimit)", unsafe.Offsetof(quota.blockSoft)},
		{"offsetof(struct fs_disk_quota, d_bcount)", unsafe.Offsetof(quota.blocks)},
		{"offsetof(struct fs_disk_quota, d_icount)", unsafe.Offsetof(quota.inodes)},
		{"sizeof(struct fs_quota_statv)", unsafe.Sizeof(state)},
		{"offsetof(struct fs_quota_statv, qs_flags)", unsafe.Offsetof(state.flags)},
		{"sizeof(struct fsxattr)", unsafe.Sizeof(attributes)},
		{"offsetof(struct fsxattr, fsx_xflags)", unsafe.Offsetof(attributes.flags)},
		{"offsetof(struct fsxattr, fsx_projid)", unsafe.Offsetof(attributes.project)},
	}
	var program, expected strings.Builder
	program.WriteString("#include <stddef.h>\n#include <stdio.h>\n#include <linux/types.h>\n#include <linux/fs.h>\n#include <linux/quota.h>\n#include <linux/dqblk_xfs.h>\nint main(void) {\n")
	for _, number := range numbers {
		fmt.Fprintf(&program, "printf(\"%%s %%lu\\n\", \"%s\", (unsigned long)(%[1]s));\n", number.expression)
		fmt.Fprintf(&expected, "%s %d\n", number.expression, number.number)
	}
	program.WriteString("}\n")
	source, binary := filepath.Join(t.TempDir(), "numbers.c"), filepath.Join(t.TempDir(), "numbers")
	if err := os.WriteFile(source, []byte(program.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if output, err := exec.Command("cc", "-o", binary, source).CombinedOutput(); err != nil {
		t.Fatalf("compile a program with the kernel headers (linux-libc-dev): %v: %s", err, output)
	}
	output, err := exec.Command(binary).Output()
	if err != nil {
		t.Fatal(err)
	}
	if string(output) != expected.String() {
		t.Errorf("headers:\n%spackage:\n%s", output, expected.String())
	}
}

func TestALimitOfLessThanABlockFails(t *testing.T) {
	for _, bytes := range []int64{-1, 1, 511} {
		if err := SetLimit(t.TempDir(), 7, bytes); err == nil || !strings.Contains(err.Error(), "less than a block") {
			t.Errorf("%d: %v", bytes, err)
		}
	}
}

func TestErrorsNameOperationDirectoryAndErrno(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "missing")
	for expected, call := range map[string]func() error{
		"read the state of project quotas of": func() error { _, _, err := State(missing); return err },
		"read the quota of project 7 of":      func() error { _, err := OfProject(missing, 7); return err },
		"set the limit of project 7 of":       func() error { return SetLimit(missing, 7, 512) },
		"open " + missing:                     func() error { _, err := ProjectOf(missing); return err },
		"to put it into project 7":            func() error { return Assign(missing, 7) },
	} {
		if err := call(); !errors.Is(err, unix.ENOENT) || !strings.Contains(err.Error(), expected) || !strings.Contains(err.Error(), missing) {
			t.Errorf("%s: %v", expected, err)
		}
	}
}

func TestALinkIsNoDirectoryOfAProject(t *testing.T) {
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(t.TempDir(), link); err != nil {
		t.Fatal(err)
	}
	if err := Assign(link, 7); !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) {
		t.Error(err)
	}
}
