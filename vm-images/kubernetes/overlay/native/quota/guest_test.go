//go:build kernel_tests && linux && (amd64 || arm64 || riscv64)

package quota

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// projects counts the project ids that tests have used. Each test has an id of its own, because XFS frees deleted files
// later.
var projects uint32 = 3_000_000_000

// onXFS returns a new directory on an XFS with enforced project quotas, and a project id without usage.
func onXFS(t *testing.T) (string, uint32) {
	t.Helper()
	mount := os.Getenv("LOOPFS_TEST_XFS")
	if mount == "" {
		t.Fatal("LOOPFS_TEST_XFS must name an XFS with project quotas: cargo harness test --lane kernel")
	}
	directory, err := os.MkdirTemp(mount, "quota")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(directory) })
	projects++
	return directory, projects
}

func makeFile(t *testing.T, size int, elements ...string) string {
	t.Helper()
	path := filepath.Join(elements...)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, make([]byte, size), 0o644)); err != nil {
		t.Fatal(err)
	}
	return path
}

func projectOfFile(t *testing.T, path string) uint32 {
	t.Helper()
	fd, err := open(unix.AT_FDCWD, path, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	var found attributes
	if err := ioctl(fd, getAttributes, &found); err != nil {
		t.Fatal(err)
	}
	return found.project
}

// walk measures a directory as the kubelet does without quotas.
func walk(t *testing.T, root string) Usage {
	t.Helper()
	var usage Usage
	err := filepath.WalkDir(root, func(path string, _ os.DirEntry, err error) error {
		var stat unix.Stat_t
		if err := errors.Join(err, unix.Lstat(path, &stat)); err != nil {
			return err
		}
		usage.Bytes += stat.Blocks * 512
		usage.Inodes++
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return usage
}

func TestOnXFSTheStateOfProjectQuotasIsThatOfTheMount(t *testing.T) {
	directory, _ := onXFS(t)
	if accounting, enforced, err := State(directory); !accounting || !enforced || err != nil {
		t.Error(accounting, enforced, err)
	}
	for _, without := range []string{os.Getenv("LOOPFS_TEST_XFS_NOQUOTA"), "/proc"} {
		if accounting, enforced, err := State(without); accounting || enforced || err != nil {
			t.Error(without, accounting, enforced, err)
		}
	}
}

func TestOnXFSTheUsageOfAProjectIsThatOfAWalkOverItsTree(t *testing.T) {
	directory, project := onXFS(t)
	for index := range 50 {
		makeFile(t, index*3000, directory, fmt.Sprintf("a/%d/b", index%5), fmt.Sprint(index))
	}
	for range 2 {
		if err := Assign(directory, project); err != nil {
			t.Fatal(err)
		}
	}
	makeFile(t, 70000, directory, "a/0/new/file")
	if err := os.Symlink("a", filepath.Join(directory, "link")); err != nil {
		t.Fatal(err)
	}
	usage, err := OfProject(directory, project)
	if expected := walk(t, directory); err != nil || usage != expected {
		t.Errorf("%v %v, and the walk finds %v", usage, err, expected)
	}
	if usage.Inodes < 60 {
		t.Error(usage)
	}
	if found, err := ProjectOf(filepath.Join(directory, "a/0/new")); found != project || err != nil {
		t.Error(found, err)
	}
}

func TestOnXFSFilesThatLinksAndMountsReachKeepTheirProject(t *testing.T) {
	directory, project := onXFS(t)
	outside, _ := onXFS(t)
	file := makeFile(t, 10, outside, "file")
	mounted := makeFile(t, 10, directory, "mounted/hidden")
	if err := errors.Join(os.Symlink(file, filepath.Join(directory, "link")), os.Symlink(outside, filepath.Join(directory, "tree")),
		unix.Mkfifo(filepath.Join(directory, "pipe"), 0o600),
		unix.Mount("tmpfs", filepath.Dir(mounted), "tmpfs", 0, "")); err != nil {
		t.Fatal(err)
	}
	err := Assign(directory, project)
	if err := errors.Join(err, unix.Unmount(filepath.Dir(mounted), 0)); err != nil {
		t.Fatal(err)
	}
	for path, expected := range map[string]uint32{outside: 0, file: 0, mounted: 0, directory: project} {
		if found := projectOfFile(t, path); found != expected {
			t.Errorf("%s: %d", path, found)
		}
	}
}

func TestOnXFSALimitHoldsUntilItIsRemoved(t *testing.T) {
	directory, project := onXFS(t)
	if err := errors.Join(SetLimit(directory, project, 1<<20), Assign(directory, project)); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(directory, "file")
	if err := os.WriteFile(path, make([]byte, 2<<20), 0o644); !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		t.Errorf("two megabytes were written: %v", err)
	}
	// The kubelet sets the largest limit that there is for a project that is only measured, and 0 to end the quota.
	for _, bytes := range []int64{1<<63 - 1, 0} {
		if err := SetLimit(directory, project, bytes); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, make([]byte, 2<<20), 0o644); err != nil {
			t.Errorf("the limit %d: %v", bytes, err)
		}
	}
}

func TestOnXFSAProjectWithoutARecordIsNotFound(t *testing.T) {
	directory, project := onXFS(t)
	if usage, err := OfProject(directory, project); !errors.Is(err, unix.ENOENT) {
		t.Error(usage, err)
	}
}
